//! Output offsets of a process that several gateways have read in succession.
//!
//! A gateway with an empty state directory may find a process that another gateway has read. It
//! does not know how many bytes that gateway has received. If it counted from zero, callers would
//! mistake new bytes for bytes that they have. Therefore each reader after the first gets a
//! separate range of [`ROOM`] offsets. The number of the reader is a property of the container.
//! Callers with an offset below the range receive a loss of unknown size, and continue in the
//! range.
//!
//! ```text
//! the property   <number> <id>   of the last reader; absent while it is the gateway that started
//! the process
//! the file       the same        `reader` beside the spools, written after the property
//! ```
//!
//! Invariant: two gateways with different state directories never use one offset for different
//! bytes.

use std::io;
use std::path::Path;

use uuid::Uuid;

const FILE: &str = "reader";
/// Number of offsets in the range of one reader.
const ROOM: u64 = 1 << 40;

/// A reader after the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reader {
    number: u64,
    id: Uuid,
}

/// The owner of the spools in a directory.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SpoolOwner {
    /// The last reader of the process owns the spools.
    Ours { base: u64 },
    /// There are no spools, or they belong to an earlier reader. This is the next reader, once it
    /// is stored on the container.
    Next(Reader),
}

impl Reader {
    /// The stored form of the reader.
    pub(super) fn text(&self) -> String {
        format!("{} {}", self.number, self.id)
    }

    fn parse(text: &str) -> Option<Self> {
        let (number, id) = text.split_once(' ')?;
        Some(Self { number: number.parse().ok()?, id: id.parse().ok()? })
    }

    /// The first offset of the range.
    pub(super) fn base(&self) -> u64 {
        self.number.saturating_mul(ROOM)
    }

    /// Claims `directory` for this reader, and removes the spools of another one. Blocks on the
    /// disk.
    pub(super) fn claim(&self, directory: &Path) -> io::Result<()> {
        match std::fs::remove_dir_all(directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::fs::create_dir_all(directory)?;
        std::fs::write(directory.join(FILE), self.text())
    }
}

/// The first offset of the spools in `directory`. `None`: there are no spools. Blocks on the disk.
pub(super) fn kept(directory: &Path) -> Option<u64> {
    let reader = std::fs::read_to_string(directory.join(FILE)).ok().and_then(|text| Reader::parse(&text));
    directory.is_dir().then(|| reader.map_or(0, |reader| reader.base()))
}

/// Compares the reader in `directory` with that of the container. Blocks on the disk.
pub(super) fn spool_owner(directory: &Path, property: Option<&str>) -> SpoolOwner {
    let last = property.and_then(Reader::parse);
    let here = std::fs::read_to_string(directory.join(FILE)).ok();
    match (last, here) {
        (None, None) if directory.is_dir() => SpoolOwner::Ours { base: 0 },
        (Some(last), Some(here)) if Reader::parse(&here).as_ref() == Some(&last) => {
            SpoolOwner::Ours { base: last.base() }
        }
        (last, _) => {
            SpoolOwner::Next(Reader { number: last.map_or(1, |last| last.number + 1), id: Uuid::new_v4() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(whose: SpoolOwner) -> Reader {
        let SpoolOwner::Next(reader) = whose else { panic!("{whose:?}") };
        reader
    }

    #[test]
    fn readers_have_disjoint_offset_ranges() -> io::Result<()> {
        let home = tempfile::tempdir()?;
        let (first, second) = (home.path().join("first"), home.path().join("second"));
        // The gateway that starts the process creates the spools.
        std::fs::create_dir(&first)?;
        assert_eq!(spool_owner(&first, None), SpoolOwner::Ours { base: 0 });
        // The next gateway has no spools, and keeps its range when it returns.
        let other = next(spool_owner(&second, None));
        other.claim(&second)?;
        let property = other.text();
        assert_eq!(spool_owner(&second, Some(&property)), SpoolOwner::Ours { base: ROOM });
        // A gateway that was killed before it wrote its file becomes another reader.
        let again = next(spool_owner(&home.path().join("third"), Some(&property)));
        assert_eq!(again.base(), 2 * ROOM);
        // The first gateway returns, after another reader was the last one.
        std::fs::write(first.join("stdout"), "what it read")?;
        let back = next(spool_owner(&first, Some(&property)));
        back.claim(&first)?;
        assert_eq!((back.base(), first.join("stdout").exists()), (2 * ROOM, false));
        assert_eq!(spool_owner(&first, Some(&back.text())), SpoolOwner::Ours { base: 2 * ROOM });
        assert_eq!(next(spool_owner(&second, Some(&back.text()))).base(), 3 * ROOM);
        Ok(())
    }
}
