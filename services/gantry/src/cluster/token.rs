//! The token that callers over TCP present: who can read the file may use the cluster.

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, bail};

/// Makes a new token and writes it where only we can read it.
pub(crate) fn generate(path: &Path) -> anyhow::Result<String> {
    let mut random = [0_u8; 32];
    let mut source = File::open("/dev/urandom").context("there is no source of randomness")?;
    std::io::Read::read_exact(&mut source, &mut random).context("there is no source of randomness")?;
    let token = crate::words::hex(&random);

    let new = path.with_extension("new");
    let write = || {
        // One that is left of a start that was cut off may have been opened by anybody who could read it then.
        if let Err(error) = std::fs::remove_file(&new)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(error);
        }
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
        writeln!(file, "{token}")?;
        std::fs::rename(&new, path)
    };
    write().with_context(|| format!("cannot write the token into {}", path.display()))?;
    Ok(token)
}

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
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn each_token_is_new_and_ours_alone() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("token");
        let first = generate(&path).expect("made");
        let second = generate(&path).expect("made");
        assert_ne!(first, second);
        assert_eq!(second.len(), 64);
        assert_eq!(std::fs::read_to_string(&path).expect("there").trim(), second);
        assert_eq!(path.metadata().expect("there").mode() & 0o777, 0o600);
    }

    #[test]
    fn only_loopback_is_safe() {
        let check = |address: &str, insecure| check(address.parse().expect("an address"), insecure).is_ok();
        assert!(check("127.0.0.1:1", false) && check("[::1]:1", false) && check("127.9.9.9:1", false));
        assert!(!check("0.0.0.0:1", false) && !check("[::]:1", false) && !check("192.0.2.1:1", false));
        assert!(check("0.0.0.0:1", true));
    }
}
