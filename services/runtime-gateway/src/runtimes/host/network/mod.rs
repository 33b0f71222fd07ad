//! Private networks: a network namespace per container, with outgoing access.
//!
//! ```text
//! container                     machine
//! eth0 10.213.x.y/32 ───veth─── gantry<id> 169.254.213.1/32 ──▶ filter ──▶ source address of the
//! machine
//! lo                            route to 10.213.x.y
//! ```
//!
//! [`prepare`] sets up the machine once, when a runtime opens. The supervisor of a container calls
//! [`connect`] in the new namespace. For an ordinary user, [`slirp`] connects it. There is no
//! teardown: the interfaces and the route end with the namespace, and so with its last process. A
//! container may join the network of another one, and then has no interface of its own.
//!
//! A container cannot reach the machine's addresses, its loopback, or other containers: see
//! [`firewall`]. It has no IPv6.

mod firewall;
mod netlink;
pub(super) mod resolver;
pub(super) mod slirp;

use std::fmt;
use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::unprivileged;
use netlink::{CREATE, Connection, EXCLUSIVE, Messages};

/// Name prefix of the machine's interfaces to containers.
const PREFIX: &str = "gantry";
/// Name of the container's interface.
const INSIDE: &str = "eth0";
/// Number of addresses that are tried before a container is rejected for lack of one.
const TRIES: u32 = 4096;

/// The addresses for containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    network: Ipv4Addr,
    bits: u8,
}

impl Default for Pool {
    fn default() -> Self {
        Self { network: Ipv4Addr::new(10, 213, 0, 0), bits: 16 }
    }
}

/// A text that is not an address pool.
#[derive(Debug, thiserror::Error)]
#[error("expected an IPv4 network of 8 to 24 bits, such as 10.213.0.0/16")]
pub struct InvalidPool;

impl FromStr for Pool {
    type Err = InvalidPool;

    fn from_str(text: &str) -> Result<Self, InvalidPool> {
        let (network, bits) = text.split_once('/').ok_or(InvalidPool)?;
        let network: Ipv4Addr = network.parse().map_err(|_| InvalidPool)?;
        let bits: u8 = bits.parse().map_err(|_| InvalidPool)?;
        let pool = Self { network, bits };
        let fits = (8..=24).contains(&bits) && network.to_bits() & (pool.size() - 1) == 0;
        if fits { Ok(pool) } else { Err(InvalidPool) }
    }
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.bits)
    }
}

impl Pool {
    fn size(self) -> u32 {
        1 << (32 - u32::from(self.bits))
    }

    /// The address of the machine's end of every pair, which is the router and the resolver of
    /// containers. Pools of one machine rarely share this address, so queries reach a gateway that
    /// answers them.
    fn resolver(self) -> Ipv4Addr {
        let [_, second, third, _] = self.network.octets();
        // 169.254.169.0/24 has services of clouds.
        Ipv4Addr::new(169, 254, 192 | second & 63, 1 + third % 253)
    }

    /// Whether an address belongs to a container.
    fn contains(self, address: std::net::IpAddr) -> bool {
        let mask = !(self.size() - 1);
        matches!(address, std::net::IpAddr::V4(address) if address.to_bits() & mask == self.network.to_bits())
    }

    /// An address of the pool, except the first and the last. Consecutive numbers have different
    /// addresses.
    fn address(self, number: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.network.to_bits() + 1 + number % (self.size() - 2))
    }
}

/// The reason why containers on this machine have no private network.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing}")]
pub(super) struct PrepareError {
    doing: &'static str,
    #[source]
    cause: io::Error,
}

fn failed(doing: &'static str) -> impl FnOnce(io::Error) -> PrepareError {
    move |cause| PrepareError { doing, cause }
}

/// Sets up the machine: enables forwarding, installs the filter, and tests whether pairs of
/// interfaces can be created. For an ordinary user, only tests what the machine permits.
pub(super) fn prepare(pool: Pool) -> Result<(), PrepareError> {
    if unprivileged::is_active() {
        return slirp::prepare(pool);
    }
    let routes = Connection::open(libc::NETLINK_ROUTE).map_err(failed("open a netlink socket"))?;
    // Several runtimes may open at the same time.
    let probe = interface(&domain::ProcessId::new().to_string());
    add_pair(&routes, &probe, None).map_err(failed("create a pair of network interfaces"))?;
    let removed = remove_link(&routes, &probe);
    removed.map_err(failed("remove a network interface"))?;
    forward().map_err(failed("forward packets (net.ipv4.ip_forward)"))?;
    firewall::Firewall::open()
        .and_then(|firewall| firewall.install(pool))
        .map_err(failed("install the packet filter"))?;
    admit_through_other_filter(&uplinks());
    Ok(())
}

/// Restores the packet filter if another program has removed it. Admits packets to interfaces that
/// have appeared since `known`.
pub(super) fn keep_filter(pool: Pool, known: &mut Vec<String>) -> io::Result<()> {
    let now = uplinks();
    if *known != now {
        admit_through_other_filter(&now);
        *known = now;
    }
    firewall::Firewall::open()?.ensure(pool)
}

fn forward() -> io::Result<()> {
    let setting = Path::new("/proc/sys/net/ipv4/ip_forward");
    if fs::read_to_string(setting)?.trim() == "1" {
        return Ok(());
    }
    fs::write(setting, "1")?;
    tracing::info!("enabled packet forwarding for containers with a private network");
    Ok(())
}

/// Admits packets of containers to `uplinks` if another program (Docker, ufw) drops forwarded
/// packets. Packets to containers of that program stay blocked.
///
/// A newer filter cannot admit packets that an older filter drops, so the rule is written with the
/// tool of the older filter.
fn admit_through_other_filter(uplinks: &[String]) {
    let iptables = |arguments: &[&str]| Command::new("iptables").arg("--wait").args(arguments).output();
    // Without the tool, no older filter is in use.
    let Ok(rules) = iptables(&["-S", "FORWARD"]) else { return };
    if !String::from_utf8_lossy(&rules.stdout).lines().any(|line| line == "-P FORWARD DROP") {
        return;
    }
    let ours = format!("{PREFIX}+");
    let outgoing = uplinks.iter().map(|uplink| vec!["FORWARD", "-i", &ours, "-o", uplink, "-j", "ACCEPT"]);
    let answers =
        vec!["FORWARD", "-o", &ours, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"];
    for rule in outgoing.chain([answers]) {
        let there = iptables(&[&["-C"], &rule[..]].concat()).is_ok_and(|found| found.status.success());
        if there {
            continue;
        }
        match iptables(&[&["-I"], &rule[..]].concat()) {
            Ok(found) if found.status.success() => {}
            found => tracing::warn!(
                rule = rule.join(" "),
                ?found,
                "cannot admit packets of containers to a filter that drops forwarded packets"
            ),
        }
    }
}

/// Connects the new network namespace of this process to the machine. `machine` was opened before
/// this process entered the namespace.
///
/// `id` makes the interface's name unique on the machine.
pub(super) fn connect(machine: &Machine, pool: Pool, id: &str) -> io::Result<()> {
    let own = Connection::open(libc::NETLINK_ROUTE)?;
    raise_loopback(&own)?;
    machine.firewall.ensure(pool)?;
    let name = interface(id);
    let routes = &machine.routes;
    add_pair(routes, &name, Some(std::process::id()))?;
    let outside = routes.index_of(&name)?;
    add_address(routes, outside, pool.resolver())?;
    set_up(routes, outside, machine.mtu)?;
    let address = (0..TRIES.min(pool.size()))
        // A process that runs for long may still have the address of an old interface.
        .map(|turn| pool.address(outside.wrapping_add(turn)))
        .find_map(|address| match add_route(routes, outside, Some(address), None, EXCLUSIVE) {
            Ok(()) => Some(Ok(address)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
            Err(error) => Some(Err(error)),
        })
        .unwrap_or_else(|| Err(io::Error::other("all addresses of the pool are in use")))?;

    let inside = own.index_of(INSIDE)?;
    add_address(&own, inside, address)?;
    set_up(&own, inside, machine.mtu)?;
    add_route(&own, inside, Some(pool.resolver()), None, 0)?;
    add_route(&own, inside, None, Some(pool.resolver()), 0)?;
    // Without the right to send raw packets, `ping` needs this setting. If settings are read-only,
    // `ping` does not work.
    if let Err(error) = fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647") {
        eprintln!("supervisor: cannot enable ping in this container: {error}");
    }
    Ok(())
}

/// Facts about the machine's network, for a process that is about to leave it.
#[derive(Debug)]
pub(super) struct Machine {
    routes: Connection,
    firewall: firewall::Firewall,
    /// MTU of the default route, in bytes.
    mtu: Option<u32>,
}

impl Machine {
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self {
            routes: Connection::open(libc::NETLINK_ROUTE)?,
            firewall: firewall::Firewall::open()?,
            mtu: default_mtu(),
        })
    }
}

/// Enables `lo`, which is down in a new network namespace.
pub(super) fn only_loopback() -> io::Result<()> {
    raise_loopback(&Connection::open(libc::NETLINK_ROUTE)?)
}

/// Allows every user of this network to listen on every port. The capability for low ports counts
/// only for root of the machine.
pub(super) fn open_low_ports() {
    if let Err(error) = fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0") {
        eprintln!("supervisor: cannot permit ports below 1024 in this container: {error}");
    }
}

fn raise_loopback(own: &Connection) -> io::Result<()> {
    enable_interface(own, own.index_of("lo")?)
}

/// The name of the machine's interface to a container.
fn interface(id: &str) -> String {
    let plain: String = id.chars().filter(char::is_ascii_hexdigit).collect();
    // A name has at most 15 bytes. The end of an id is random.
    format!("{PREFIX}{}", &plain[plain.len().saturating_sub(9)..])
}

/// The interfaces to other machines, sorted: those of default routes, network cards, and tunnels.
/// Bridges and their ports are excluded, because they mostly belong to containers and machines of
/// other programs.
pub(super) fn uplinks() -> Vec<String> {
    uplinks_among(&routes())
}

/// The uplinks of a machine with these routes, in the format of `/proc/net/route`.
fn uplinks_among(routes: &str) -> Vec<String> {
    let defaults = default_interfaces(routes);
    let reaches_others = |name: &String| {
        let at = Path::new("/sys/class/net").join(name);
        let has = |file: &str| at.join(file).exists();
        let kinds = ["wireguard", "vlan", "bond", "ppp", "wlan", "wwan"];
        let kind = fs::read_to_string(at.join("uevent")).unwrap_or_default();
        let is_known = || {
            let kind = kind.lines().find_map(|line| line.strip_prefix("DEVTYPE="));
            kind.is_some_and(|kind| kinds.contains(&kind))
        };
        !has("brport") && (has("device") || has("tun_flags") || is_known())
    };
    let all = fs::read_dir("/sys/class/net").into_iter().flatten();
    let names = all.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    // `/sys` may show another network.
    let mut found: Vec<_> = defaults.into_iter().chain(names.filter(reaches_others)).collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn routes() -> String {
    fs::read_to_string("/proc/net/route").unwrap_or_default()
}

/// The interfaces of default routes.
fn default_interfaces(routes: &str) -> Vec<String> {
    let fields = routes.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let defaults =
        fields.filter(|fields| fields.get(1) == Some(&"00000000") && fields.get(7) == Some(&"00000000"));
    defaults.map(|fields| fields[0].to_owned()).collect()
}

/// MTU of the default route, in bytes.
fn default_mtu() -> Option<u32> {
    let uplink = default_interfaces(&routes()).into_iter().next()?;
    fs::read_to_string(Path::new("/sys/class/net").join(uplink).join("mtu")).ok()?.trim().parse().ok()
}

/// The header of messages about links.
fn link(index: u32, flags: u32, change: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..].copy_from_slice(&change.to_ne_bytes());
    header
}

/// Creates a pair of interfaces. The second one is in the namespace of the process `peer`, or
/// beside the first.
fn add_pair(routes: &Connection, name: &str, peer: Option<u32>) -> io::Result<()> {
    const DATA: u16 = 2;
    const KIND: u16 = 1;
    const PEER: u16 = 1;
    let mut messages = Messages::default();
    messages.add(libc::RTM_NEWLINK, CREATE | EXCLUSIVE, &link(0, 0, 0), |new| {
        new.text(libc::IFLA_IFNAME, name).nested(libc::IFLA_LINKINFO, |info| {
            info.text(KIND, "veth").nested(DATA, |data| {
                data.nested_after(PEER, &link(0, 0, 0), |other| {
                    if let Some(process) = peer {
                        other.text(libc::IFLA_IFNAME, INSIDE).number(libc::IFLA_NET_NS_PID, process);
                    }
                });
            });
        });
    });
    routes.send(&messages)
}

fn remove_link(routes: &Connection, name: &str) -> io::Result<()> {
    let mut messages = Messages::default();
    messages.add(libc::RTM_DELLINK, 0, &link(0, 0, 0), |old| _ = old.text(libc::IFLA_IFNAME, name));
    routes.send(&messages)
}

fn enable_interface(routes: &Connection, index: u32) -> io::Result<()> {
    let up = u32::try_from(libc::IFF_UP).unwrap_or(1);
    let mut messages = Messages::default();
    messages.add(libc::RTM_NEWLINK, 0, &link(index, up, up), |_| {});
    routes.send(&messages)
}

/// Enables one interface of a pair, without an IPv6 address.
fn set_up(routes: &Connection, index: u32, mtu: Option<u32>) -> io::Result<()> {
    const IPV6: u16 = 10;
    const ADDRESS_GENERATION: u16 = 8;
    const NONE: u8 = 1;
    let mut messages = Messages::default();
    messages.add(libc::RTM_NEWLINK, 0, &link(index, 0, 0), |change| {
        change.nested(libc::IFLA_AF_SPEC, |families| {
            families.nested(IPV6, |family| _ = family.bytes(ADDRESS_GENERATION, &[NONE]));
        });
    });
    // A kernel without IPv6 does not need this.
    if let Err(error) = routes.send(&messages)
        && error.raw_os_error() != Some(libc::EAFNOSUPPORT)
    {
        return Err(error);
    }
    if let Some(bytes) = mtu {
        let mut messages = Messages::default();
        messages.add(libc::RTM_NEWLINK, 0, &link(index, 0, 0), |change| {
            change.number(libc::IFLA_MTU, bytes);
        });
        routes.send(&messages)?;
    }
    enable_interface(routes, index)
}

const IPV4: u8 = 2;

fn add_address(routes: &Connection, index: u32, address: Ipv4Addr) -> io::Result<()> {
    let [a, b, c, d] = index.to_ne_bytes();
    let mut messages = Messages::default();
    // Family, bits of the network, flags, scope, index.
    messages.add(libc::RTM_NEWADDR, CREATE, &[IPV4, 32, 0, 0, a, b, c, d], |new| {
        let address = address.octets();
        new.bytes(libc::IFA_LOCAL, &address).bytes(libc::IFA_ADDRESS, &address);
    });
    routes.send(&messages)
}

/// Adds a route to `to`, or a default route.
fn add_route(
    routes: &Connection,
    index: u32,
    to: Option<Ipv4Addr>,
    by: Option<Ipv4Addr>,
    flags: u16,
) -> io::Result<()> {
    const MAIN: u8 = 254;
    const STATIC: u8 = 4;
    const UNICAST: u8 = 1;
    /// Scope of destinations that are reached without a router.
    const LINK: u8 = 253;
    let bits = if to.is_some() { 32 } else { 0 };
    let scope = if by.is_some() { 0 } else { LINK };
    let mut messages = Messages::default();
    // Family, bits of destination and source, type of service, table, protocol, scope, type, flags.
    let header = [IPV4, bits, 0, 0, MAIN, STATIC, scope, UNICAST, 0, 0, 0, 0];
    messages.add(libc::RTM_NEWROUTE, CREATE | flags, &header, |new| {
        if let Some(to) = to {
            new.bytes(libc::RTA_DST, &to.octets());
        }
        if let Some(by) = by {
            new.bytes(libc::RTA_GATEWAY, &by.octets());
        }
        new.number(libc::RTA_OIF, index);
    });
    routes.send(&messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_is_a_whole_network() {
        for text in ["10.213.0.0/16", "172.16.0.0/12", "192.168.7.0/24"] {
            assert_eq!(text.parse::<Pool>().map(|pool| pool.to_string()).ok().as_deref(), Some(text));
        }
        for text in ["", "10.213.0.0", "10.213.0.1/16", "10.0.0.0/30", "10.0.0.0/33", "::/64", "0.0.0.0/0"] {
            assert!(text.parse::<Pool>().is_err(), "{text}");
        }
    }

    #[test]
    fn pool_has_no_first_and_no_last_address() {
        let pool: Pool = "10.1.2.0/24".parse().expect("a pool");
        assert_eq!(pool.address(0), Ipv4Addr::new(10, 1, 2, 1));
        assert_eq!(pool.address(253), Ipv4Addr::new(10, 1, 2, 254));
        assert_eq!(pool.address(254), Ipv4Addr::new(10, 1, 2, 1));
        assert_eq!(pool.address(u32::MAX), pool.address(u32::MAX % 254));
    }

    #[test]
    fn pools_ask_for_names_at_different_addresses() {
        let resolver = |pool: &str| pool.parse::<Pool>().expect("a pool").resolver();
        assert_eq!(Pool::default().resolver(), Ipv4Addr::new(169, 254, 213, 1));
        assert_eq!(resolver("10.214.7.0/24"), Ipv4Addr::new(169, 254, 214, 8));
        for pool in ["10.169.253.0/24", "10.41.253.0/24"] {
            assert_eq!(resolver(pool), Ipv4Addr::new(169, 254, 233, 1), "not an address of a cloud service");
        }
    }

    #[test]
    fn interface_name_fits() {
        let name = interface(&domain::ProcessId::new().to_string());
        assert!(name.len() <= 15 && name.starts_with(PREFIX), "{name}");
    }
}
