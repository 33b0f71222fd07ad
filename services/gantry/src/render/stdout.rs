//! Answers on standard output: ids, tables and JSON.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use serde::Serialize;

use crate::ending::error::Interrupted;
use crate::ending::exit_code;

/// Writes `text`. If standard output has no reader, the command ends as after SIGPIPE.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let write = || write_all(&mut io::stdout().as_fd().try_clone_to_owned()?.into(), text.as_bytes());
    match write() {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Interrupted(exit_code::PIPE).into()),
        result => result.context("cannot write to standard output"),
    }
}

/// Writes one JSON document and a newline.
pub(crate) fn print_json(document: &impl Serialize) -> anyhow::Result<()> {
    print(&format!("{}\n", serde_json::to_string(document)?))
}

/// Writes all bytes. Waits if another process that shares the file has made it non-blocking.
pub(crate) fn write_all(file: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(file, PollFlags::OUT)], None)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
