//! Further ids of an ordinary user, from `/etc/subuid` and `/etc/subgid`.
//!
//! Sources: newuidmap(1), subuid(5).

use std::fs;
use std::process::Command;

/// A range of ids that the administrator has granted to a user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SubordinateIds {
    /// The program that maps them.
    program: &'static str,
    /// The id of the user or of its group.
    own: u32,
    first: u32,
    count: u32,
}

impl SubordinateIds {
    /// The first range of the user `uid` in a file such as `/etc/subuid`.
    pub(super) fn of(program: &'static str, file: &str, uid: u32, own: u32) -> Option<Self> {
        let (text, accounts) = (fs::read_to_string(file).ok()?, fs::read_to_string("/etc/passwd").ok()?);
        let (first, count) = granted(&text, &accounts, uid)?;
        Some(Self { program, own, first, count })
    }

    /// Maps the ids of the process's namespace. `false`: nothing was mapped.
    pub(super) fn map(self, pid: u32) -> bool {
        let Self { program, own, first, count } = self;
        let arguments = [pid, 0, own, 1, 1, first, count].map(|number| number.to_string());
        match Command::new(program).args(arguments).output() {
            Ok(output) if output.status.success() => true,
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                eprintln!("gantry: {program} failed, so containers have a single user: {}", text.trim());
                false
            }
            // The program is not installed.
            Err(_) => false,
        }
    }
}

/// Finds the first range of a user in the text of `/etc/subuid`.
fn granted(text: &str, accounts: &str, uid: u32) -> Option<(u32, u32)> {
    let id = uid.to_string();
    let name = accounts.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == id).then_some(name)
    });
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let owner = fields.next()?;
        let (first, count) = (fields.next()?.parse().ok()?, fields.next()?.trim().parse().ok()?);
        (owner == id || Some(owner) == name).then_some((first, count)).filter(|(_, count)| *count > 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subordinate_ids_are_found_by_name_and_number() {
        let accounts = "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001:Ann:/home/ann:/bin/sh\n";
        let text = "# comment\nbob:1:2\nann:100000:65536\n12345:200000:10\nann:300000:5\n";
        assert_eq!(granted(text, accounts, 1000), Some((100_000, 65_536)));
        assert_eq!(granted(text, accounts, 12_345), Some((200_000, 10)));
        assert_eq!(granted(text, accounts, 7), None);
        assert_eq!(granted("ann:1:0\nann:x:y\n", accounts, 1000), None);
    }
}
