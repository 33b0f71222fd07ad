//! Check of the TCP address on which a cluster on this machine listens.

use std::net::SocketAddr;

use anyhow::bail;

/// Rejects an address that other machines can reach, because the token would travel unencrypted.
pub(crate) fn check(address: SocketAddr, insecure: bool) -> anyhow::Result<()> {
    if address.ip().is_loopback() || insecure {
        return Ok(());
    }
    bail!(
        "cannot listen on {address}: other machines can reach it, and nothing is encrypted; use 127.0.0.1, or allow it with --insecure"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_safe() {
        let check = |address: &str, insecure| check(address.parse().expect("an address"), insecure).is_ok();
        assert!(check("127.0.0.1:1", false) && check("[::1]:1", false) && check("127.9.9.9:1", false));
        assert!(!check("0.0.0.0:1", false) && !check("[::]:1", false) && !check("192.0.2.1:1", false));
        assert!(check("0.0.0.0:1", true));
    }
}
