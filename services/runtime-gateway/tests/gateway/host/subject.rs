//! A host runtime for a test, with temporary directories.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use runtime::Runtime;
use runtime_gateway::host::{HostConfig, HostRuntime, Permission, Policy};
use tempfile::TempDir;
use testing::conformance::Subject;

/// Small, so that tests fill it quickly.
pub(crate) const SPOOL: u64 = 256 * 1024;

/// The variable with the path of the supervisor, for tests of another user.
pub(crate) const SUPERVISOR: &str = "TEST_SUPERVISOR";

pub(crate) struct HostSubject {
    runtime: Option<Arc<HostRuntime>>,
    pub(crate) dir: TempDir,
}

/// The configuration with directories in `dir`.
pub(crate) fn config(dir: &Path) -> HostConfig {
    HostConfig {
        state_dir: dir.join("state"),
        runtime_dir: dir.join("run"),
        supervisor: std::env::var_os(SUPERVISOR)
            .map_or_else(|| env!("CARGO_BIN_EXE_runtime-gateway").into(), Into::into),
        spool_bytes: SPOOL,
        masked: Vec::new(),
        policy: Policy::allowing([Permission::HostImage, Permission::HostNetwork, Permission::Privileged]),
    }
}

/// Opens a runtime with directories in `dir`. Waits until a previous runtime has ended.
pub(crate) async fn open(dir: &Path) -> Arc<HostRuntime> {
    let mut runtime = HostRuntime::open(config(dir));
    for _ in 0..200 {
        if runtime.is_ok() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        runtime = HostRuntime::open(config(dir));
    }
    runtime.expect("open the runtime")
}

impl HostSubject {
    /// `None` if this machine cannot run containers.
    pub(crate) fn new() -> Option<Self> {
        Self::with_spool(SPOOL)
    }

    /// Creates a subject with this spool size, in bytes.
    pub(crate) fn with_spool(spool_bytes: u64) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not applicable: this process is not root");
            return None;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let config = HostConfig { spool_bytes, ..config(dir.path()) };
        let runtime = HostRuntime::open(config).expect("open the runtime");
        Some(Self { runtime: Some(runtime), dir })
    }

    /// Closes the runtime.
    pub(crate) async fn close(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        let old = Arc::downgrade(&runtime);
        drop(runtime);
        // Tasks of the old runtime keep it alive.
        testing::conformance::until("the end of the old runtime", || old.strong_count() == 0).await;
    }

    pub(crate) fn host(&self) -> Arc<HostRuntime> {
        Arc::clone(self.runtime.as_ref().expect("a runtime"))
    }
}

#[async_trait]
impl Subject for HostSubject {
    fn runtime(&self) -> Arc<dyn Runtime> {
        self.host()
    }

    fn spool_bytes(&self) -> u64 {
        SPOOL
    }

    async fn reopen(&mut self) {
        self.close().await;
        self.runtime = Some(open(self.dir.path()).await);
    }
}

impl Drop for HostSubject {
    /// Removes everything, also when a test has failed.
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        let clean = move || {
            let local =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a tokio runtime");
            local.block_on(async {
                let held = runtime.list().await.expect("list");
                for container in held.containers {
                    runtime.destroy_container(container).await.expect("destroy a container");
                }
                // The newest first, so that children precede their parents.
                for volume in held.volumes.into_iter().rev() {
                    runtime.destroy_volume(volume).await.expect("destroy a volume");
                }
            });
        };
        let cleaned = std::thread::spawn(clean).join();
        if cleaned.is_err() && !std::thread::panicking() {
            panic!("cannot clean up after a test");
        }
    }
}
