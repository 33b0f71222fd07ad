//! Who reads what a process says, and from where its offsets count.
//!
//! A gateway that finds a process which another one has read, in a state directory of its own, does not know how much that one got. Were it
//! to count from the beginning, callers would take what comes for what they have had. So it counts from where nobody has been: each
//! reader after the first gets [`ROOM`] of its own, by its number, which is a property of the container. Callers who come from below are
//! told that some is missing, nobody knows how much, and go on there.
//!
//! ```text
//! the property   <number> <id>   of the last reader; absent while it is the gateway that started the process
//! the file       the same        `reader` beside the spools, written after the property
//! ```
//!
//! Invariant: two gateways with state directories of their own never use one offset for different bytes.

use std::io;
use std::path::Path;

use uuid::Uuid;

const FILE: &str = "reader";
/// How many offsets a reader has for itself.
const ROOM: u64 = 1 << 40;

/// A reader after the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reader {
    number: u64,
    id: Uuid,
}

/// Whose the spools in a directory are.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// Of the last reader of the process.
    Ours { base: u64 },
    /// There are none, or of an earlier reader. The next one is this, once it is on the container.
    Next(Reader),
}

impl Reader {
    /// As it is written down.
    pub(super) fn text(&self) -> String {
        format!("{} {}", self.number, self.id)
    }

    fn parse(text: &str) -> Option<Self> {
        let (number, id) = text.split_once(' ')?;
        Some(Self { number: number.parse().ok()?, id: id.parse().ok()? })
    }

    /// Where its offsets begin.
    pub(super) fn base(&self) -> u64 {
        self.number.saturating_mul(ROOM)
    }

    /// Makes `directory` its own: what is there is another's. Blocks on the disk.
    pub(super) fn claim(&self, directory: &Path) -> io::Result<()> {
        match std::fs::remove_dir_all(directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::fs::create_dir_all(directory)?;
        std::fs::write(directory.join(FILE), self.text())
    }
}

/// Where the offsets of what is kept in `directory` begin. `None`: nothing is. Blocks on the disk.
pub(super) fn kept(directory: &Path) -> Option<u64> {
    let reader = std::fs::read_to_string(directory.join(FILE)).ok().and_then(|text| Reader::parse(&text));
    directory.is_dir().then(|| reader.map_or(0, |reader| reader.base()))
}

/// Compares what is in `directory` with what the container says. Blocks on the disk.
pub(super) fn whose(directory: &Path, property: Option<&str>) -> Whose {
    let last = property.and_then(Reader::parse);
    let here = std::fs::read_to_string(directory.join(FILE)).ok();
    match (last, here) {
        (None, None) if directory.is_dir() => Whose::Ours { base: 0 },
        (Some(last), Some(here)) if Reader::parse(&here).as_ref() == Some(&last) => {
            Whose::Ours { base: last.base() }
        }
        (last, _) => {
            Whose::Next(Reader { number: last.map_or(1, |last| last.number + 1), id: Uuid::new_v4() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(whose: Whose) -> Reader {
        let Whose::Next(reader) = whose else { panic!("{whose:?}") };
        reader
    }

    #[test]
    fn no_two_readers_count_from_one_place() -> io::Result<()> {
        let home = tempfile::tempdir()?;
        let (first, second) = (home.path().join("first"), home.path().join("second"));
        // Who started it made the spools.
        std::fs::create_dir(&first)?;
        assert_eq!(whose(&first, None), Whose::Ours { base: 0 });
        // The next has none, and keeps its place when it comes back.
        let other = next(whose(&second, None));
        other.claim(&second)?;
        let property = other.text();
        assert_eq!(whose(&second, Some(&property)), Whose::Ours { base: ROOM });
        // One that was killed before it wrote anything itself is another reader then.
        let again = next(whose(&home.path().join("third"), Some(&property)));
        assert_eq!(again.base(), 2 * ROOM);
        // The first, once it was not the last any more.
        std::fs::write(first.join("stdout"), "what it read")?;
        let back = next(whose(&first, Some(&property)));
        back.claim(&first)?;
        assert_eq!((back.base(), first.join("stdout").exists()), (2 * ROOM, false));
        assert_eq!(whose(&first, Some(&back.text())), Whose::Ours { base: 2 * ROOM });
        assert_eq!(next(whose(&second, Some(&back.text()))).base(), 3 * ROOM);
        Ok(())
    }
}
