//! Where a cluster on this machine may listen over TCP.

use std::net::SocketAddr;

use anyhow::bail;

/// Refuses an address that others can reach: nothing is encrypted, and whoever has the token is as good as us.
pub(crate) fn check(address: SocketAddr, insecure: bool) -> anyhow::Result<()> {
    if address.ip().is_loopback() || insecure {
        return Ok(());
    }
    bail!(
        "{address} can be reached from other machines, and nothing is encrypted; listen on 127.0.0.1, or say --insecure"
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
