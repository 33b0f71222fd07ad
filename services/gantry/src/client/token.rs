//! Cluster token: from `--token-file`, or from the default file of the services on this machine.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::cli::addresses::Addresses;

/// Reads the default token file of services on this machine, and returns its path and the token.
/// `None` if an address is not on the loopback, because another cluster must not receive the token.
///
/// # Errors
///
/// Fails if another user may have made the file.
pub(crate) fn default_token(addresses: &Addresses) -> anyhow::Result<Option<(PathBuf, String)>> {
    if !addresses.are_on_loopback() {
        return Ok(None);
    }
    match server::token::read_default() {
        Err(error) if error.is::<server::token::UntrustedFile>() => Err(error),
        // A file that this user may not read belongs to other services.
        found => Ok(found.ok().flatten()),
    }
}

/// Reads a token from a file.
pub(crate) fn read_token(file: &Path) -> anyhow::Result<String> {
    let token =
        std::fs::read_to_string(file).with_context(|| format!("cannot read the token file {file:?}"))?;
    match token.trim() {
        "" => bail!("the token file {file:?} is empty"),
        token => Ok(token.to_owned()),
    }
}

/// Options of a command that select the cluster, for advice about errors.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ClusterOptions<'a> {
    pub(crate) server: Option<&'a str>,
    pub(crate) token_file: Option<&'a Path>,
}

impl ClusterOptions<'_> {
    /// Returns the remedy for a reason, if it depends on these options.
    pub(crate) fn advice(self, reason: &str) -> Option<String> {
        match (reason, self) {
            ("UNAVAILABLE", Self { server: Some(server), .. }) => {
                Some(format!("check that the cluster runs and that {server} is its address, or try again"))
            }
            ("PERMISSION_DENIED", Self { server: Some(server), .. }) => {
                let user = owner(Path::new(server.strip_prefix("unix://")?))?;
                Some(format!(
                    "{server} belongs to user {user}; run gantry as that user, or use TCP and the cluster token"
                ))
            }
            ("UNAUTHENTICATED", Self { token_file: Some(file), .. }) => Some(format!(
                "{} does not hold the token of this cluster; each `gantry up --listen` makes a new one",
                file.display()
            )),
            ("UNAUTHENTICATED", Self { server: Some(server), .. }) => {
                let (file, _) = default_token(&Addresses::parse(server).ok()?).ok()??;
                Some(format!(
                    "the default file {} does not hold the token of this cluster; give the token file of the cluster with --token-file",
                    file.display()
                ))
            }
            _ => None,
        }
    }
}

/// Returns the owner of `path`, or of its nearest readable ancestor.
fn owner(path: &Path) -> Option<u32> {
    path.ancestors().find_map(|path| Some(path.symlink_metadata().ok()?.uid()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_address_and_token_file() {
        let server = ClusterOptions { server: Some("http://there:1"), ..ClusterOptions::default() };
        let advice = server.advice("UNAVAILABLE");
        assert_eq!(
            advice.as_deref(),
            Some("check that the cluster runs and that http://there:1 is its address, or try again")
        );
        let token = ClusterOptions { token_file: Some(Path::new("old")), ..ClusterOptions::default() };
        assert!(
            token
                .advice("UNAUTHENTICATED")
                .is_some_and(|advice| advice.contains("old does not hold the token of this cluster"))
        );
        assert_eq!(ClusterOptions::default().advice("UNAVAILABLE"), None);
    }
}
