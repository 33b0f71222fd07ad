//! Netlink requests to the kernel: messages, attributes, acknowledgements.
//!
//! Both `rtnetlink` (links, addresses, routes) and `nf_tables` (the packet filter) use this format.
//! The libraries for `nf_tables` need a C library or have an unsuitable licence. With an encoder
//! for it, `rtnetlink` needs only four messages.
//!
//! Sources: `include/uapi/linux/netlink.h`, RFC 3549.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Requests an acknowledgement with the result.
const REQUEST: u16 = 1 | 4;
/// Creates a missing object.
pub(super) const CREATE: u16 = 0x400;
/// Fails if the object exists.
pub(super) const EXCLUSIVE: u16 = 0x200;
/// Appends to a list.
pub(super) const APPEND: u16 = 0x800;

const HEADER: usize = 16;
const ERROR: u16 = 2;
const NESTED: u16 = 0x8000;

/// The attributes of a message or of a nested attribute.
#[derive(Debug, Default)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    pub(super) fn bytes(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(super) fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// Adds a number in the byte order of `rtnetlink`.
    pub(super) fn number(&mut self, kind: u16, value: u32) -> &mut Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// Adds a number in the byte order of `nf_tables`.
    pub(super) fn big_endian(&mut self, kind: u16, value: u32) -> &mut Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    pub(super) fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) -> &mut Self {
        self.nested_after(kind, &[], fill)
    }

    /// Adds an attribute whose value is a header, followed by attributes.
    pub(super) fn nested_after(
        &mut self,
        kind: u16,
        header: &[u8],
        fill: impl FnOnce(&mut Self),
    ) -> &mut Self {
        let mut inner = Self(header.to_vec());
        fill(&mut inner);
        self.bytes(kind | NESTED, &inner.0)
    }

    /// Adds all attributes of `other`.
    pub(super) fn append(&mut self, other: Self) -> &mut Self {
        self.0.extend_from_slice(&other.0);
        self
    }
}

/// Messages that are sent together.
#[derive(Debug, Default)]
pub(super) struct Messages {
    bytes: Vec<u8>,
    /// Number of messages with an acknowledgement.
    acknowledged: usize,
}

impl Messages {
    /// Adds a message of `kind` with an acknowledgement.
    pub(super) fn add(&mut self, kind: u16, flags: u16, header: &[u8], fill: impl FnOnce(&mut Attributes)) {
        self.acknowledged += 1;
        self.push(kind, REQUEST | flags, header, fill);
    }

    /// Adds a message of `kind` that marks the beginning or the end of a batch.
    pub(super) fn mark(&mut self, kind: u16, header: &[u8]) {
        self.push(kind, 1, header, |_| {});
    }

    fn push(&mut self, kind: u16, flags: u16, header: &[u8], fill: impl FnOnce(&mut Attributes)) {
        let mut body = Attributes(header.to_vec());
        fill(&mut body);
        let length = u32::try_from(HEADER + body.0.len()).unwrap_or(u32::MAX);
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        // A sequence number, which answers would repeat, and the sender, which the kernel sets.
        self.bytes.extend_from_slice(&[0; 8]);
        self.bytes.extend_from_slice(&body.0);
    }
}

/// A connection to the kernel, in the network namespace in which it was opened.
#[derive(Debug)]
pub(super) struct Connection(OwnedFd);

impl Connection {
    /// Opens a connection for `libc::NETLINK_ROUTE` or `libc::NETLINK_NETFILTER`.
    pub(super) fn open(protocol: libc::c_int) -> io::Result<Self> {
        // SAFETY: the call takes no pointers.
        let socket = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(socket) }))
    }

    /// Opens a connection that becomes readable after a change of an IPv4 route in this network
    /// namespace. Each address has a route.
    pub(super) fn of_route_changes() -> io::Result<Self> {
        const IPV4_ROUTES: u32 = 0x40;
        let opened = Self::open(libc::NETLINK_ROUTE)?;
        // SAFETY: all zeros is a valid value of this plain struct.
        let mut group: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        group.nl_family = libc::sa_family_t::try_from(libc::AF_NETLINK).unwrap_or(16);
        group.nl_groups = IPV4_ROUTES;
        let size = libc::socklen_t::try_from(size_of_val(&group)).unwrap_or(0);
        // SAFETY: the address has the stated size.
        if unsafe { libc::bind(opened.0.as_raw_fd(), (&raw const group).cast(), size) } < 0 {
            return Err(io::Error::last_os_error());
        }
        rustix::io::ioctl_fionbio(&opened.0, true)?;
        Ok(opened)
    }

    /// Discards all pending messages.
    pub(super) fn discard_pending(&self) -> io::Result<()> {
        use rustix::io::Errno;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match rustix::io::read(&self.0, &mut buffer) {
                Err(Errno::AGAIN) => return Ok(()),
                // Without buffers, the kernel has discarded messages.
                Ok(_) | Err(Errno::INTR | Errno::NOBUFS) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends messages, and waits for their results.
    ///
    /// Errors: the first error of the kernel.
    pub(super) fn send(&self, messages: &Messages) -> io::Result<()> {
        self.exchange(messages, |_| {})
    }

    /// Sends one message, and passes the answer before its acknowledgement to `look`.
    pub(super) fn exchange(&self, messages: &Messages, mut look: impl FnMut(&[u8])) -> io::Result<()> {
        rustix::io::write(&self.0, &messages.bytes)?;
        let mut due = messages.acknowledged;
        let mut failed = None;
        let mut buffer = vec![0; 1 << 16];
        while due > 0 && failed.is_none() {
            let length = match rustix::io::read(&self.0, &mut buffer) {
                Err(rustix::io::Errno::INTR) => continue,
                result => result?,
            };
            let mut rest = &buffer[..length];
            while let Some((message, after)) = next(rest) {
                rest = after;
                let kind = u16::from_ne_bytes([message[4], message[5]]);
                if kind != ERROR {
                    look(&message[HEADER..]);
                    continue;
                }
                due = due.saturating_sub(1);
                let code = message.get(HEADER..HEADER + 4).and_then(|code| code.try_into().ok());
                let code = code.map_or(libc::EPROTO, |code| -i32::from_ne_bytes(code));
                if code != 0 && failed.is_none() {
                    failed = Some(io::Error::from_raw_os_error(code));
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// The index of the interface with this name.
    pub(super) fn index_of(&self, name: &str) -> io::Result<u32> {
        let mut found = None;
        let mut messages = Messages::default();
        messages.add(libc::RTM_GETLINK, 0, &[0; 16], |link| {
            link.text(libc::IFLA_IFNAME, name);
        });
        self.exchange(&messages, |answer| {
            // The index is the third field of `ifinfomsg`.
            found = answer.get(4..8).and_then(|index| index.try_into().ok()).map(u32::from_ne_bytes);
        })?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Splits off the first message.
fn next(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = bytes.get(..4)?.try_into().ok().map(u32::from_ne_bytes)?;
    let length = usize::try_from(length).ok().filter(|length| (HEADER..=bytes.len()).contains(length))?;
    let (message, _) = bytes.split_at(length);
    Some((message, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}
