//! What the deletion of volumes frees on the disks of workers. Volumes share files, so the sum of
//! their sizes may be many times as much.

use std::collections::HashMap;

use futures::stream::{self, StreamExt, TryStreamExt};
use rpc::pb::artifacts::{Artifact, CollectResponse, ObjectKind};

use crate::client::connect::Connection;
use crate::client::queries;
use crate::client::references::known;
use crate::render::table::bytes;

/// Number of volumes that are read at a time.
const CONCURRENT_CALLS: usize = 16;

/// The measured parts of the disks that volumes take, by their handles.
pub(crate) type DiskParts = HashMap<String, u64>;

/// Reads what volumes take on the disks. Call it before the volumes are deleted.
pub(crate) async fn disk_parts<'a>(
    connection: &Connection,
    handles: impl IntoIterator<Item = &'a str>,
) -> anyhow::Result<DiskParts> {
    let read = async |handle: &str| {
        let volume = known(queries::volume(connection, handle).await)?;
        let part = volume.and_then(|volume| volume.disk_bytes);
        anyhow::Ok(part.map(|part| (handle.to_owned(), part)))
    };
    let parts = stream::iter(handles).map(read).buffer_unordered(CONCURRENT_CALLS);
    parts.try_filter_map(async |part| Ok(part)).try_collect().await
}

/// Returns the handles of the replicas of artifacts.
pub(crate) fn handles(artifacts: &[Artifact]) -> impl Iterator<Item = &str> {
    artifacts.iter().flat_map(|artifact| &artifact.replicas).map(|replica| replica.volume_handle.as_str())
}

/// Space that the deletion of volumes frees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FreedSpace {
    /// Bytes on the disks. `None`: no volume is measured.
    pub(crate) disk_bytes: Option<u64>,
    /// Sizes of the volumes that are not measured.
    unmeasured_bytes: u64,
}

impl FreedSpace {
    /// Adds a volume with this size.
    pub(crate) fn add(&mut self, parts: &DiskParts, handle: &str, size_bytes: u64) {
        match parts.get(handle) {
            Some(part) => *self.disk_bytes.get_or_insert(0) += part,
            None => self.unmeasured_bytes += size_bytes,
        }
    }

    /// Adds collected volumes. Artifacts have no bytes besides those of their volumes.
    pub(crate) fn add_collected(&mut self, parts: &DiskParts, collected: &CollectResponse) {
        let volumes = collected.collected.iter().filter(|one| one.kind() == ObjectKind::Volume);
        volumes.for_each(|volume| self.add(parts, &volume.id, volume.size_bytes));
    }

    /// Describes the space, such as `, about 3.0 MiB of disk`. Empty: there are no volumes.
    pub(crate) fn text(&self) -> String {
        match (self.disk_bytes, self.unmeasured_bytes) {
            (None, 0) => String::new(),
            (Some(disk), 0) => format!(", about {} of disk", bytes(disk)),
            (None, contents) => {
                format!(", contents of {} (what they take on the disk is not measured yet)", bytes(contents))
            }
            (Some(disk), contents) => format!(
                ", about {} of disk, and contents of {} that are not measured yet",
                bytes(disk),
                bytes(contents)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_space_is_measured_or_named_contents() {
        let parts = DiskParts::from([("a".to_owned(), 1024), ("b".to_owned(), 2048)]);
        let text = |handles: &[&str]| {
            let mut freed = FreedSpace::default();
            handles.iter().for_each(|handle| freed.add(&parts, handle, 4096));
            freed.text()
        };
        assert_eq!(text(&[]), "");
        assert_eq!(text(&["a", "b"]), ", about 3.0 KiB of disk");
        assert_eq!(text(&["c"]), ", contents of 4.0 KiB (what they take on the disk is not measured yet)");
        assert_eq!(
            text(&["a", "c"]),
            ", about 1.0 KiB of disk, and contents of 4.0 KiB that are not measured yet"
        );
    }
}
