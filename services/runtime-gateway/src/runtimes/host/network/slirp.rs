//! Private networks of an ordinary user: the program `slirp4netns` beside each container.
//!
//! ```text
//! container                               machine
//! eth0 10.213.0.100/24 ──▶ filter ──tap──▶ slirp4netns ──▶ sockets of the user
//! lo                                       10.213.0.3: the first name server of the machine
//! ```
//!
//! The supervisor of a container calls [`connect`]. The program ends with the supervisor, because
//! it watches a pipe whose other end is open only there.
//!
//! Invariant: packets reach no address of the machine, and nothing else that a private network
//! blocks. The program would send them as the user, so the filter is in the network of the
//! container. It is complete before the program starts, and follows the addresses of the machine.
//! No process of a container has the capability to change it.
//!
//! Source: slirp4netns(1).

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::FdFlags;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Resource, Rlimit};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use super::firewall::{Firewall, Network, OF_CLOUDS, connection_limit};
use super::netlink::Connection;
use super::{INSIDE, Pool, PrepareError, failed, only_loopback, uplinks_among};
use crate::util::mapped_ids::MappedIds;

/// The program, which is found in the `PATH` of the gateway.
pub(super) const PROGRAM: &str = "slirp4netns";
/// MTU between the container and the program, in bytes. The program sends streams of its own, so
/// it need not be that of the machine.
const MTU: &str = "65520";
/// Longest time until the program has connected a container.
const START: Duration = Duration::from_secs(10);

/// Networks that are never beyond the machine: this one, its loopback, groups, broadcasts.
const LOCAL: [Network; 3] =
    [(Ipv4Addr::new(0, 0, 0, 0), 8), (Ipv4Addr::new(127, 0, 0, 0), 8), (Ipv4Addr::new(224, 0, 0, 0), 3)];

/// The address at which the program answers DNS queries.
pub(in crate::runtimes::host) fn resolver(pool: Pool) -> Ipv4Addr {
    Ipv4Addr::from_bits(pool.network.to_bits() + 3)
}

/// Tests whether containers can be connected.
pub(super) fn prepare(pool: Pool) -> Result<(), PrepareError> {
    let connected = Uplink::start(pool, Stdio::piped());
    let (mut uplink, _) = connected.map_err(failed("start slirp4netns for a new network"))?;
    uplink.await_ready().map_err(failed("connect a network by slirp4netns"))
}

/// Moves this process into a new network that a program connects to that of the machine.
///
/// This process must have one thread. [`Uplink::await_ready`] must succeed before the network is
/// used.
pub(in crate::runtimes::host) fn connect(pool: Pool) -> io::Result<Uplink> {
    let (uplink, namespace) = Uplink::start(pool, Stdio::inherit())?;
    rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    Ok(uplink)
}

/// The connection of a container's network to that of the machine. Ends when it is dropped.
#[derive(Debug)]
pub(in crate::runtimes::host) struct Uplink {
    program: Child,
    /// The end of a pipe whose other end the program watches.
    _alive: OwnedFd,
    /// Readable when the program has connected the network, or has ended.
    ready: OwnedFd,
    pool: Pool,
    machine: MachineNetwork,
    firewall: Firewall,
    blocked: Vec<Network>,
}

impl Uplink {
    /// Starts the program for a new network namespace, which is returned.
    fn start(pool: Pool, messages: Stdio) -> io::Result<(Self, OwnedFd)> {
        let machine = MachineNetwork::open()?;
        let blocked = machine.blocked(pool)?;
        let (namespace, firewall) = create_network(pool, &blocked)?;
        let (watched, alive) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let (ready, tell_ready) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // The program inherits both, and opens the namespace by its number.
        for inherited in [&tell_ready, &namespace] {
            rustix::io::fcntl_setfd(inherited, FdFlags::empty())?;
        }
        let first = pool.network;
        let program = Command::new(PROGRAM)
            .args(["--configure", "--enable-sandbox", "--enable-seccomp", "--disable-host-loopback"])
            .args([format!("--mtu={MTU}"), format!("--cidr={first}/24")])
            .args(["--exit-fd=0".to_owned(), format!("--ready-fd={}", tell_ready.as_raw_fd())])
            .args(["--netns-type=path".to_owned(), format!("/proc/self/fd/{}", namespace.as_raw_fd())])
            .arg(INSIDE)
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .current_dir("/")
            .stdin(watched)
            .stdout(Stdio::null())
            .stderr(messages)
            .spawn()
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => io::Error::new(error.kind(), "the program is not installed"),
                _ => error,
            })?;
        rustix::io::fcntl_setfd(&namespace, FdFlags::CLOEXEC)?;
        let uplink = Self { program, _alive: alive, ready, pool, machine, firewall, blocked };
        uplink.limit_connections()?;
        Ok((uplink, namespace))
    }

    /// Limits the sockets of the program, and so the connections of the container.
    fn limit_connections(&self) -> io::Result<()> {
        // An ordinary user cannot raise the limit of the machine.
        let most = rustix::process::getrlimit(Resource::Nofile).maximum;
        let most = Some(most.unwrap_or(u64::MAX).min(u64::from(connection_limit())));
        let pid = i32::try_from(self.program.id()).ok().and_then(Pid::from_raw);
        rustix::process::prlimit(pid, Resource::Nofile, Rlimit { current: most, maximum: most })?;
        Ok(())
    }

    /// Waits until the network is connected.
    pub(in crate::runtimes::host) fn await_ready(&mut self) -> io::Result<()> {
        let mut poll = [PollFd::new(&self.ready, PollFlags::IN)];
        let limit = Timespec { tv_sec: START.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: 0 };
        if rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, Some(&limit)))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if rustix::io::retry_on_intr(|| rustix::io::read(&self.ready, &mut [0]))? == 1 {
            return Ok(());
        }
        let end = self.program.wait()?;
        let mut text = String::new();
        if let Some(messages) = &mut self.program.stderr {
            messages.read_to_string(&mut text)?;
        }
        Err(io::Error::other(format!("{PROGRAM} ended with {end}: {}", text.trim().replace('\n', "; "))))
    }

    /// Readable when the addresses of the machine may have changed.
    pub(in crate::runtimes::host) fn changes(&self) -> BorrowedFd<'_> {
        self.machine.changes.as_fd()
    }

    /// Adapts the filter to the addresses of the machine.
    pub(in crate::runtimes::host) fn follow_changes(&mut self) -> io::Result<()> {
        self.machine.changes.discard_pending()?;
        let blocked = self.machine.blocked(self.pool)?;
        if blocked != self.blocked {
            self.firewall.install_inside(resolver(self.pool), &blocked)?;
            self.blocked = blocked;
        }
        Ok(())
    }
}

impl Drop for Uplink {
    fn drop(&mut self) {
        // Both fail only if the program has ended.
        _ = self.program.kill();
        _ = self.program.wait();
    }
}

/// Creates a network namespace with a filter.
fn create_network(pool: Pool, blocked: &[Network]) -> io::Result<(OwnedFd, Firewall)> {
    let create = || {
        // SAFETY: a network namespace belongs to a thread, so the other threads stay in theirs.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET)? };
        only_loopback()?;
        disable_ipv6()?;
        admit_ping();
        let firewall = Firewall::open()?;
        firewall.install_inside(resolver(pool), blocked)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let namespace = rustix::fs::openat(CWD, "/proc/thread-self/ns/net", flags, Mode::empty())?;
        Ok((namespace, firewall))
    };
    // An ordinary user cannot return to the network of the machine.
    std::thread::scope(|scope| {
        let created = scope.spawn(create).join();
        created.unwrap_or_else(|_| Err(io::Error::other("the thread that creates a network panicked")))
    })
}

/// Keeps later interfaces of this network without an IPv6 address.
fn disable_ipv6() -> io::Result<()> {
    const NO_ADDRESS: &str = "1";
    match fs::write("/proc/sys/net/ipv6/conf/default/addr_gen_mode", NO_ADDRESS) {
        // A kernel without IPv6.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Admits `ping` in this network, without the right to send raw packets.
fn admit_ping() {
    let groups = format!("0 {}", MappedIds::of_this_process().last_group());
    if let Err(error) = fs::write("/proc/sys/net/ipv4/ping_group_range", groups) {
        eprintln!("cannot enable ping in a container: {error}");
    }
}

/// The network of the machine, for a process that has left it.
#[derive(Debug)]
struct MachineNetwork {
    /// An open file shows the network in which it was opened.
    addresses: File,
    routes: File,
    changes: Connection,
}

impl MachineNetwork {
    fn open() -> io::Result<Self> {
        // Before the files are read, so that no change is missed.
        let changes = Connection::of_route_changes()?;
        let open = |name: &str| File::open(Path::new("/proc/thread-self/net").join(name));
        Ok(Self { addresses: open("fib_trie")?, routes: open("route")?, changes })
    }

    /// The networks that containers do not reach, each outside of the others.
    fn blocked(&self, pool: Pool) -> io::Result<Vec<Network>> {
        let read = |mut file: &File| {
            let mut text = String::new();
            file.rewind()?;
            file.read_to_string(&mut text)?;
            Ok::<_, io::Error>(text)
        };
        let routes = read(&self.routes)?;
        let uplinks = uplinks_among(&routes);
        let mut found: Vec<_> = LOCAL.into_iter().chain(OF_CLOUDS).collect();
        found.push((pool.network, pool.bits));
        found.extend(local_networks(&read(&self.addresses)?));
        // Behind other interfaces are containers and machines of other programs.
        found.extend(attached_networks(&routes, |interface| {
            !uplinks.iter().any(|uplink| uplink == interface)
        }));
        Ok(without_parts(found))
    }
}

/// The addresses of the machine in the text of `/proc/net/fib_trie`.
fn local_networks(text: &str) -> Vec<Network> {
    let mut found = Vec::new();
    let mut address = None;
    for line in text.lines().map(str::trim_start) {
        if let Some(leaf) = line.strip_prefix("|-- ") {
            address = leaf.parse().ok();
        } else if let (Some(address), Some(rest)) = (address, line.strip_prefix('/'))
            && let (Some(bits), true) = (rest.split(' ').next(), rest.ends_with(" LOCAL"))
        {
            found.extend(bits.parse().ok().map(|bits| (address, bits)));
        }
    }
    found
}

/// The networks of the interfaces for which `is_counted` holds, in the text of `/proc/net/route`.
fn attached_networks(text: &str, is_counted: impl Fn(&str) -> bool) -> Vec<Network> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let routes = text.lines().skip(1).filter_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let (interface, destination, mask) =
            (*fields.first()?, number(fields.get(1)?)?, number(fields.get(7)?)?);
        let bits = u8::try_from(mask.count_ones()).ok()?;
        // The numbers are in network order. A route without an interface leads nowhere.
        (bits > 0 && interface != "*" && is_counted(interface))
            .then(|| (Ipv4Addr::from(destination.to_ne_bytes()), bits))
    });
    routes.collect()
}

/// Sorts networks, and removes those that are part of another one.
fn without_parts(mut networks: Vec<Network>) -> Vec<Network> {
    networks.sort_unstable_by_key(|(address, bits)| (*bits, *address));
    let mut kept: Vec<Network> = Vec::new();
    for (address, bits) in networks {
        let is_part_of = |(other, shared): &Network| {
            (address.to_bits() ^ other.to_bits()).checked_shr(32 - u32::from(*shared)).unwrap_or(0) == 0
        };
        if !kept.iter().any(is_part_of) {
            kept.push((address, bits));
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks(texts: &[&str]) -> Vec<Network> {
        let network = |text: &&str| {
            let (address, bits) = text.split_once('/').expect("a network");
            (address.parse().expect("an address"), bits.parse().expect("a number"))
        };
        texts.iter().map(network).collect()
    }

    #[test]
    fn local_addresses_are_found() {
        let text = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n\
            \x20       |-- 127.0.0.0\n           /8 host LOCAL\n     |-- 192.0.2.0\n        /24 link UNICAST\n\
            \x20    |-- 192.0.2.2\n        /32 host LOCAL\n     |-- 192.0.2.255\n        /32 link BROADCAST\n";
        assert_eq!(local_networks(text), networks(&["127.0.0.0/8", "192.0.2.2/32"]));
    }

    #[test]
    fn networks_of_other_interfaces_are_found() {
        let text = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
            eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0\n\
            eth0 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n\
            docker0 000011AC 00000000 0001 0 0 0 0000FFFF 0 0 0\n\
            * 0000FE0A 00000000 0201 0 0 0 0000FFFF 0 0 0\n";
        let expected = if cfg!(target_endian = "little") { "172.17.0.0/16" } else { "0.0.17.172/16" };
        assert_eq!(attached_networks(text, |interface| interface != "eth0"), networks(&[expected]));
    }

    #[test]
    fn parts_of_networks_are_removed() {
        let all = networks(&["10.1.2.3/32", "10.1.0.0/16", "192.0.2.1/32", "192.0.2.1/32", "10.2.0.0/16"]);
        assert_eq!(without_parts(all), networks(&["10.1.0.0/16", "10.2.0.0/16", "192.0.2.1/32"]));
        assert_eq!(without_parts(networks(&["10.1.0.0/16", "0.0.0.0/0"])), networks(&["0.0.0.0/0"]));
    }
}
