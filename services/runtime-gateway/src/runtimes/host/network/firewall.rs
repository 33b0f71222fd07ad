//! Packet filters of private networks: one `nf_tables` table, whose rules are replaced atomically.
//! Connection counts survive a replacement. The table of an ordinary user is in the network of the
//! container, and has only the chain `output`: see [`super::slirp`].
//!
//! ```text
//! input    from a container: replies, and DNS queries to the resolver's address
//! forward  from a container: not to other containers, not to cloud metadata services of the
//! machine
//!          to a container:   only replies
//! both     from a container: no connection beyond its share of the machine's connection tracking
//! output   to a container:   only replies
//! source   from the address pool: leaves with the address of the machine
//! ```
//!
//! Rules match interfaces by their prefix, so the table stays unchanged when containers start or
//! end.
//!
//! Source: `include/uapi/linux/netfilter/nf_tables.h`.

use std::fs;
use std::io;
use std::net::Ipv4Addr;

use super::netlink::{APPEND, Attributes, CREATE, Connection, Messages};
use super::{PREFIX, Pool};

/// IPv4 and IPv6.
const INET: u8 = 1;
const SUBSYSTEM: u16 = 10 << 8;
const NEW_TABLE: u16 = SUBSYSTEM;
/// The family, the version, and no resource.
const HEADER: [u8; 4] = [INET, 0, 0, 0];
const GET_TABLE: u16 = SUBSYSTEM | 1;
const NEW_CHAIN: u16 = SUBSYSTEM | 3;
const NEW_RULE: u16 = SUBSYSTEM | 6;
const DELETE_RULE: u16 = SUBSYSTEM | 8;
const NEW_SET: u16 = SUBSYSTEM | 9;

/// The set of interfaces to containers, each with its connections.
const CONNECTIONS: &str = "connections";
/// Size of an interface name, in bytes.
const NAME_LENGTH: u32 = 16;

const INPUT: u32 = 1;
const FORWARD: u32 = 2;
const OUTPUT: u32 = 3;
const POSTROUTING: u32 = 4;

/// An IPv4 network: its first address, and the number of bits that its addresses share.
pub(super) type Network = (Ipv4Addr, u8);

/// Addresses of cloud metadata services for names, settings and credentials: link-local addresses,
/// and those of Azure, Alibaba and Oracle.
pub(super) const OF_CLOUDS: [Network; 4] = [
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    (Ipv4Addr::new(100, 100, 100, 200), 32),
    (Ipv4Addr::new(192, 0, 0, 192), 32),
];

/// The header of a packet that a rule reads.
#[derive(Debug, Clone, Copy)]
enum Header {
    Network = 1,
    Transport = 2,
}

/// The metadata of a packet that a rule reads.
#[derive(Debug, Clone, Copy)]
enum Meta {
    InputName = 6,
    OutputName = 7,
    Family = 15,
    Transport = 16,
}

/// The expressions of one rule. A load puts its result in register 1. A comparison ends the rule
/// unless it holds.
#[derive(Debug, Default)]
struct Rule(Attributes);

impl Rule {
    fn expression(mut self, name: &str, fill: impl FnOnce(&mut Attributes)) -> Self {
        self.0.nested(1, |element| {
            element.text(1, name).nested(2, fill);
        });
        self
    }

    fn meta(self, what: Meta) -> Self {
        self.expression("meta", |meta| {
            meta.big_endian(1, 1).big_endian(2, what as u32);
        })
    }

    fn payload(self, header: Header, offset: u32, length: u32) -> Self {
        self.expression("payload", |payload| {
            payload.big_endian(1, 1).big_endian(2, header as u32).big_endian(3, offset).big_endian(4, length);
        })
    }

    fn masked(self, mask: &[u8]) -> Self {
        self.expression("bitwise", |bitwise| {
            bitwise.big_endian(1, 1).big_endian(2, 1).big_endian(3, u32::try_from(mask.len()).unwrap_or(0));
            bitwise.nested(4, |value| _ = value.bytes(1, mask));
            bitwise.nested(5, |value| _ = value.bytes(1, &vec![0; mask.len()]));
        })
    }

    fn compared(self, equal: bool, value: &[u8]) -> Self {
        self.expression("cmp", |compare| {
            compare.big_endian(1, 1).big_endian(2, u32::from(!equal));
            compare.nested(3, |data| _ = data.bytes(1, value));
        })
    }

    fn input_is_container(self) -> Self {
        self.meta(Meta::InputName).compared(true, PREFIX.as_bytes())
    }

    fn output_is_container(self, whether: bool) -> Self {
        self.meta(Meta::OutputName).compared(whether, PREFIX.as_bytes())
    }

    fn output_is_loopback(self) -> Self {
        // With its end, the name is compared as a whole.
        self.meta(Meta::OutputName).compared(true, b"lo\0")
    }

    fn ipv4(self) -> Self {
        self.meta(Meta::Family).compared(true, &[2])
    }

    fn ipv6(self) -> Self {
        self.meta(Meta::Family).compared(true, &[10])
    }

    fn source_in(self, network: Ipv4Addr, bits: u8) -> Self {
        self.address_in(12, network, bits)
    }

    fn destination_in(self, network: Ipv4Addr, bits: u8) -> Self {
        self.address_in(16, network, bits)
    }

    fn address_in(self, offset: u32, network: Ipv4Addr, bits: u8) -> Self {
        let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
        let masked = network.to_bits() & mask;
        self.ipv4()
            .payload(Header::Network, offset, 4)
            .masked(&mask.to_be_bytes())
            .compared(true, &masked.to_be_bytes())
    }

    fn port_is(self, protocol: u8, port: u16) -> Self {
        self.meta(Meta::Transport)
            .compared(true, &[protocol])
            .payload(Header::Transport, 2, 2)
            .compared(true, &port.to_be_bytes())
    }

    /// Matches packets of established and related connections.
    fn replies(self) -> Self {
        const ESTABLISHED_OR_RELATED: u32 = 2 | 4;
        self.state(ESTABLISHED_OR_RELATED)
    }

    /// Matches the first packet of a connection if its container has more than `most` connections.
    fn over_limit(self, most: u32) -> Self {
        const NEW: u32 = 8;
        const ABOVE: u32 = 1;
        self.state(NEW).meta(Meta::InputName).expression("dynset", |add| {
            add.text(1, CONNECTIONS).big_endian(2, 1).big_endian(3, 0).big_endian(4, 1).nested(7, |count| {
                count.text(1, "connlimit");
                count.nested(2, |limit| _ = limit.big_endian(1, most).big_endian(2, ABOVE));
            });
        })
    }

    fn state(self, one_of: u32) -> Self {
        self.expression("ct", |ct| _ = ct.big_endian(1, 1).big_endian(2, 0))
            .masked(&one_of.to_ne_bytes())
            .compared(false, &[0; 4])
    }

    fn accept(self) -> Self {
        self.expression("immediate", |immediate| {
            immediate.big_endian(1, 0).nested(2, |data| {
                data.nested(2, |verdict| _ = verdict.big_endian(1, 1));
            });
        })
    }

    /// Rejects a packet with an answer, so that the connection of the sender fails at once.
    fn reject(self) -> Self {
        // ICMP or ICMPv6: administratively prohibited.
        self.expression("reject", |reject| _ = reject.big_endian(1, 2).bytes(2, &[3]))
    }

    fn masquerade(self) -> Self {
        self.expression("masq", |_| {})
    }

    /// Masquerades from a port of 1024 or above, because some servers trust lower ports as root's.
    fn masquerade_from_ordinary_port(self, protocol: u8) -> Self {
        const LEAST: u16 = 1024;
        // Without this flag the kernel ignores the two registers.
        const PORTS: u32 = 2;
        let load = |rule: Self, register: u32, port: u16| {
            rule.expression("immediate", |immediate| {
                let port = port.to_be_bytes();
                immediate.big_endian(1, register).nested(2, |data| _ = data.bytes(1, &port));
            })
        };
        let rule = self.meta(Meta::Transport).compared(true, &[protocol]);
        load(load(rule, 1, LEAST), 2, u16::MAX).expression("masq", |masquerade| {
            masquerade.big_endian(1, PORTS).big_endian(2, 1).big_endian(3, 2);
        })
    }
}

/// The packet filter of the network namespace in which it was opened.
#[derive(Debug)]
pub(super) struct Firewall(Connection);

impl Firewall {
    pub(super) fn open() -> io::Result<Self> {
        Connection::open(libc::NETLINK_NETFILTER).map(Self)
    }

    /// Creates the table, or replaces its rules.
    ///
    /// Errors: the kernel has no `nf_tables`, or this process may not change them
    /// (`CAP_NET_ADMIN`).
    pub(super) fn install(&self, pool: Pool) -> io::Result<()> {
        self.0.send(&table(pool, connection_limit()))
    }

    /// Creates the table of a network whose packets a program takes, or replaces its rules. Packets
    /// leave only to the resolver, and to IPv4 addresses outside of `blocked`.
    ///
    /// Errors: as [`Self::install`].
    pub(super) fn install_inside(&self, resolver: Ipv4Addr, blocked: &[Network]) -> io::Result<()> {
        self.0.send(&inside_table(resolver, blocked))
    }

    /// Creates the table if another program has removed it.
    pub(super) fn ensure(&self, pool: Pool) -> io::Result<()> {
        let mut messages = Messages::default();
        messages.add(GET_TABLE, 0, &HEADER, |table| _ = table.text(1, &name(pool)));
        match self.0.send(&messages) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.install(pool),
            result => result,
        }
    }
}

fn name(pool: Pool) -> String {
    format!("gantry-{pool}").replace(['/', '.'], "-")
}

/// Limit of connections per container: 1/32 of the machine's connection tracking table.
pub(super) fn connection_limit() -> u32 {
    const USUAL: u32 = 262_144;
    let most = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max");
    // Without the setting, connection tracking is not loaded yet.
    most.ok().and_then(|most| most.trim().parse().ok()).unwrap_or(USUAL) / 32
}

/// Messages that replace a table.
struct Table {
    name: String,
    messages: Messages,
}

impl Table {
    /// The third and fourth byte name the subsystem, in network order.
    const BATCH: [u8; 4] = [0, 0, 0, 10];

    fn new(name: String) -> Self {
        let mut messages = Messages::default();
        messages.mark(0x10, &Self::BATCH);
        messages.add(NEW_TABLE, CREATE, &HEADER, |table| _ = table.text(1, &name));
        Self { name, messages }
    }

    /// Creates a chain, or replaces its rules.
    fn chain(&mut self, chain: &str, kind: &str, hook: u32, priority: u32, rules: Vec<Rule>) {
        let Self { name, messages } = self;
        messages.add(NEW_CHAIN, CREATE, &HEADER, |new| {
            new.text(1, name).text(3, chain).text(7, kind);
            new.nested(4, |at| _ = at.big_endian(1, hook).big_endian(2, priority));
        });
        messages.add(DELETE_RULE, 0, &HEADER, |all| _ = all.text(1, name).text(2, chain));
        for Rule(expressions) in rules {
            messages.add(NEW_RULE, CREATE | APPEND, &HEADER, |new| {
                new.text(1, name).text(2, chain).nested(4, |list| _ = list.append(expressions));
            });
        }
    }

    fn finish(mut self) -> Messages {
        self.messages.mark(0x11, &Self::BATCH);
        self.messages
    }
}

const UDP: u8 = 17;
const TCP: u8 = 6;

fn inside_table(resolver: Ipv4Addr, blocked: &[Network]) -> Messages {
    let mut table = Table::new("gantry".to_owned());
    let names = |protocol| Rule::default().destination_in(resolver, 32).port_is(protocol, 53).accept();
    let mut output = vec![Rule::default().output_is_loopback().accept(), names(UDP), names(TCP)];
    output.extend(
        blocked.iter().map(|(network, bits)| Rule::default().destination_in(*network, *bits).reject()),
    );
    output.push(Rule::default().ipv6().reject());
    table.chain("output", "filter", OUTPUT, 0, output);
    table.finish()
}

fn table(pool: Pool, connections: u32) -> Messages {
    let mut table = Table::new(name(pool));
    let Table { name, messages } = &mut table;
    // An interface is removed from the set with its last connection.
    messages.add(NEW_SET, CREATE, &HEADER, |set| {
        const CHANGED_BY_RULES: u32 = 0x20;
        const INTERFACE_NAME: u32 = 41;
        set.text(1, name).text(2, CONNECTIONS).big_endian(3, CHANGED_BY_RULES).big_endian(4, INTERFACE_NAME);
        set.big_endian(5, NAME_LENGTH).nested(9, |size| _ = size.big_endian(1, 1 << 16)).big_endian(10, 1);
    });
    let beyond = || Rule::default().input_is_container().over_limit(connections).reject();
    let names = |protocol| {
        Rule::default()
            .input_is_container()
            .destination_in(pool.resolver(), 32)
            .port_is(protocol, 53)
            .accept()
    };
    let answers = Rule::default().input_is_container().replies().accept();
    let input =
        vec![answers, beyond(), names(UDP), names(TCP), Rule::default().input_is_container().reject()];
    table.chain("input", "filter", INPUT, 0, input);
    let mut forward = vec![Rule::default().input_is_container().output_is_container(true).reject()];
    let of_clouds = OF_CLOUDS.into_iter();
    forward.extend(
        of_clouds.map(|(network, bits)| {
            Rule::default().input_is_container().destination_in(network, bits).reject()
        }),
    );
    forward.extend([
        beyond(),
        Rule::default().output_is_container(true).replies().accept(),
        Rule::default().output_is_container(true).reject(),
    ]);
    table.chain("forward", "filter", FORWARD, 0, forward);
    let output = vec![
        Rule::default().output_is_container(true).replies().accept(),
        Rule::default().output_is_container(true).reject(),
    ];
    table.chain("output", "filter", OUTPUT, 0, output);
    let leaves = || Rule::default().source_in(pool.network, pool.bits).output_is_container(false);
    let source = vec![
        leaves().masquerade_from_ordinary_port(TCP),
        leaves().masquerade_from_ordinary_port(UDP),
        leaves().masquerade(),
    ];
    table.chain("postrouting", "nat", POSTROUTING, 100, source);
    table.finish()
}
