//! Volumes as directories, and pending creations.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use serde_json::{Map, Value, json};

use super::{Driver, State, empty, lock, owners};

/// A program with its error output discarded. Only its failure is reported.
fn quiet(program: &str) -> Command {
    let mut command = Command::new(program);
    command.stderr(Stdio::null());
    command
}

#[derive(Default)]
pub(super) struct Volumes {
    pub(super) live: BTreeMap<String, Volume>,
    /// Each creation that was not deleted. `None` while it is pending, or its result.
    pub(super) futures: BTreeMap<String, Option<Result<Value, u16>>>,
}

pub(super) struct Volume {
    /// `None`: the volume was created with null properties.
    pub(super) properties: Option<Map<String, Value>>,
    pub(super) privileged: bool,
    parent: Option<String>,
}

impl State {
    pub(super) fn describe(&self, handle: &str, volume: &Volume) -> Value {
        json!({
            "handle": handle,
            "path": self.path(handle),
            "properties": volume.properties,
            "privileged": volume.privileged,
        })
    }

    /// Whether a volume has the ids of the host. `None`: the volume does not exist.
    pub(super) fn privilege(&self, handle: &str) -> Option<bool> {
        lock(&self.volumes).live.get(handle).map(|volume| volume.privileged)
    }

    /// Adapts the owners of a volume to its privilege. Like the genuine server, this ignores
    /// errors.
    pub(super) fn align(&self, handle: &str, privileged: bool) {
        if self.ids {
            _ = owners::align(&self.path(handle), privileged);
        }
    }

    /// Creates a volume. The error is an HTTP status.
    pub(super) fn create(&self, handle: &str, request: &Value) -> Result<Value, u16> {
        lock(&self.creations).push(request.clone());
        let mut volumes = lock(&self.volumes);
        let text = |name: &str| request["strategy"][name].as_str();
        let parent = match text("type") {
            Some("cow") => {
                Some(text("volume").filter(|name| volumes.live.contains_key(*name)).ok_or(422_u16)?)
            }
            Some("empty" | "import") => None,
            _ => return Err(422),
        };
        if volumes.live.contains_key(handle) {
            if self.driver == Driver::Overlay {
                empty(&self.path(handle));
            }
            return Err(500);
        }

        let making = self.root.path().join("init").join(handle);
        let path = making.join("volume");
        std::fs::create_dir_all(&path).map_err(|_| 500_u16)?;
        let source = match parent {
            Some(parent) => Some(self.path(parent)),
            None => text("path").filter(|_| text("type") == Some("import")).map(Into::into),
        };
        if text("type") == Some("import") && source.is_none() {
            return Err(500);
        }
        if let Some(source) = source {
            let done = if source.is_dir() {
                let follow = request["strategy"]["follow_symlinks"].as_bool() == Some(true);
                let how = if follow { "-Lr" } else { "-a" };
                quiet("cp").arg(how).arg(source.join(".")).arg(&path).status()
            } else {
                quiet("tar").args(["-xzf"]).arg(source).arg("-C").arg(&path).status()
            };
            if !done.is_ok_and(|status| status.success()) {
                _ = std::fs::remove_dir_all(&making);
                return Err(500);
            }
        }
        std::fs::rename(&making, self.live().join(handle)).map_err(|_| 500_u16)?;
        let volume = Volume {
            properties: request["properties"].as_object().cloned(),
            privileged: request["privileged"].as_bool() == Some(true),
            parent: parent.map(str::to_owned),
        };
        let id = |name: &str| request[name].as_i64().and_then(|id| u32::try_from(id).ok());
        if let (Some(uid), Some(gid)) = (id("uid"), id("gid")) {
            _ = owners::give(&self.path(handle), (uid, gid));
        }
        self.align(handle, volume.privileged);
        let mut answer = self.describe(handle, &volume);
        for name in ["uid", "gid"] {
            if let Some(id) = request[name].as_i64() {
                answer[name] = id.into();
            }
        }
        volumes.live.insert(handle.to_owned(), volume);
        Ok(answer)
    }

    /// Whether a creation is reported as unfinished.
    pub(super) fn is_pending(&self) -> bool {
        let mut faults = lock(&self.faults);
        let is_pending = faults.slow_creations > 0;
        faults.slow_creations = faults.slow_creations.saturating_sub(1);
        is_pending
    }

    /// Destroys a volume. The error is an HTTP status. The volume is unlisted before its first file
    /// is removed, and stays unlisted if the removal fails.
    pub(super) fn destroy(&self, handle: &str) -> Result<(), u16> {
        let mut volumes = lock(&self.volumes);
        if !volumes.live.contains_key(handle) {
            return Err(404);
        }
        let mut faults = lock(&self.faults);
        if faults.stuck.iter().any(|stuck| stuck == handle) {
            return Err(500);
        }
        let dead = self.dead().join(handle);
        std::fs::rename(self.live().join(handle), &dead).map_err(|_| 500_u16)?;
        volumes.live.remove(handle);
        if self.driver == Driver::Overlay {
            let children = volumes.live.iter().filter(|(_, volume)| volume.parent.as_deref() == Some(handle));
            children.for_each(|(child, _)| empty(&self.path(child)));
        }
        if faults.half_destroyed > 0 {
            faults.half_destroyed -= 1;
            return Err(500);
        }
        // An archive that is still being unpacked may add files meanwhile.
        std::fs::remove_dir_all(dead).map_err(|_| 500)
    }

    /// Removes the remains of destroyed volumes.
    pub(super) fn clean_up(&self) {
        let _turn = lock(&self.volumes);
        empty(&self.dead());
    }
}
