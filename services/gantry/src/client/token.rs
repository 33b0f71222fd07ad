//! The token of a cluster: from the file that is named, or from where this machine's services keep it.

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
