//! The token of a cluster: from the file that is named, or from where this machine's services keep it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::cli::addresses::Addresses;

/// Reads the token of services on this machine that were told of no token file, and answers its path, too. `None` if an address is not on
/// the loopback: it may be somebody else's.
///
/// # Errors
///
/// Another user may have made the file.
pub(crate) fn default_token(addresses: &Addresses) -> anyhow::Result<Option<(PathBuf, String)>> {
    if !addresses.are_on_loopback() {
        return Ok(None);
    }
    match server::token::read_default() {
        Err(error) if error.is::<server::token::UntrustedFile>() => Err(error),
        // A file that this user may not read is of other services.
        found => Ok(found.ok().flatten()),
    }
}

pub(crate) fn read_token(file: &Path) -> anyhow::Result<String> {
    let token =
        std::fs::read_to_string(file).with_context(|| format!("cannot read the token in {file:?}"))?;
    match token.trim() {
        "" => bail!("{file:?} holds no token"),
        token => Ok(token.to_owned()),
    }
}

/// The options of a command that name its cluster, for advice about errors.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ClusterOptions<'a> {
    pub(crate) server: Option<&'a str>,
    pub(crate) token_file: Option<&'a Path>,
}

impl ClusterOptions<'_> {
    /// What to do about a reason, if these options explain it.
    pub(crate) fn advice(self, reason: &str) -> Option<String> {
        match (reason, self) {
            ("UNAVAILABLE", Self { server: Some(server), .. }) => {
                Some(format!("see whether it runs and {server} is its address, or try again"))
            }
            ("PERMISSION_DENIED", Self { server: Some(server), .. }) => {
                let user = owner(Path::new(server.strip_prefix("unix://")?))?;
                Some(format!(
                    "{server} belongs to user {user}; use it as that one, or over TCP with its token"
                ))
            }
            ("UNAUTHENTICATED", Self { token_file: Some(file), .. }) => Some(format!(
                "what {} holds is not that; each `gantry up --listen` makes a new one",
                file.display()
            )),
            ("UNAUTHENTICATED", Self { server: Some(server), .. }) => {
                let (file, _) = default_token(&Addresses::parse(server).ok()?).ok()??;
                Some(format!(
                    "what {} holds, the default for services on this machine, is not that; name the cluster's token file with --token-file",
                    file.display()
                ))
            }
            _ => None,
        }
    }
}

/// Who owns `path`, or what is around it as far as we may look.
fn owner(path: &Path) -> Option<u32> {
    path.ancestors().find_map(|path| Some(path.symlink_metadata().ok()?.uid()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_the_address_and_the_token_file_that_were_given() {
        let server = ClusterOptions { server: Some("http://there:1"), ..ClusterOptions::default() };
        let advice = server.advice("UNAVAILABLE");
        assert_eq!(
            advice.as_deref(),
            Some("see whether it runs and http://there:1 is its address, or try again")
        );
        let token = ClusterOptions { token_file: Some(Path::new("old")), ..ClusterOptions::default() };
        assert!(
            token
                .advice("UNAUTHENTICATED")
                .is_some_and(|advice| advice.contains("what old holds is not that"))
        );
        assert_eq!(ClusterOptions::default().advice("UNAVAILABLE"), None);
    }
}
