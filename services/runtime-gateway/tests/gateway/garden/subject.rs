//! A Garden runtime for a test, with separate servers.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use concourse::garden::Settings;
use domain::VolumeHandle;
use runtime::{Contents, Root, Runtime, RuntimeError, VolumeSource, WorkerProvided, WorkerProvidedPath};
use runtime_gateway::garden::{GardenConfig, GardenRuntime, ProvidedImage};
use tempfile::TempDir;
use testing::baggageclaim::{self, Driver};
use testing::conformance::Subject;
use testing::garden::{Manner, Server, Times};

/// Small, so that tests fill it quickly.
pub(crate) const SPOOL: u64 = 256 * 1024;

/// A Garden server.
pub(crate) enum Garden {
    /// The simulated server.
    Ours(Server),
    /// The genuine package, in a separate process.
    Genuine(super::genuine::Server),
}

impl Garden {
    fn address(&self) -> String {
        match self {
            Self::Ours(server) => server.address(),
            Self::Genuine(server) => server.address.clone(),
        }
    }
}

pub(crate) struct GardenSubject {
    runtime: Option<Arc<GardenRuntime>>,
    garden: Garden,
    pub(crate) volumes: baggageclaim::Server,
    dir: TempDir,
    image: VolumeHandle,
    roots: Mutex<Vec<VolumeHandle>>,
}

/// A configuration with timeouts that exceed those of the tests.
pub(crate) fn config(garden: &Garden, volumes: &baggageclaim::Server, dir: &Path) -> GardenConfig {
    let config = GardenConfig::new(garden.address(), volumes.address().to_string(), dir.join("state"));
    let mut certs_path = None;
    let mut resource_types = Vec::new();
    for WorkerProvidedPath { what, version, path } in
        testing::conformance::worker_provided(&dir.join("provided"))
    {
        match what {
            WorkerProvided::ResourceType(name) => resource_types.push(ProvidedImage { name, version, path }),
            WorkerProvided::Certs => certs_path = Some(path),
        }
    }
    GardenConfig {
        certs_path,
        resource_types,
        spool_bytes: SPOOL,
        start_patience: Duration::from_millis(300),
        settings: Settings { retry_for: Duration::ZERO, ..config.settings.clone() },
        ..config
    }
}

impl GardenSubject {
    /// `None` if this process may not confine processes.
    pub(crate) async fn new(manner: Manner, driver: Driver) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not applicable: this process is not root");
            return None;
        }
        let volumes = baggageclaim::Server::start(driver).await;
        Some(Self::over(Self::ours(manner, Duration::from_secs(5)), volumes).await)
    }

    fn ours(manner: Manner, stop: Duration) -> Garden {
        Garden::Ours(Server::with_times(manner, Times { stop, ..Times::default() }))
    }

    /// A worker with short timeouts for stops.
    pub(crate) async fn impatient(manner: Manner) -> Option<Self> {
        let mut subject = Self::new(manner, Driver::Overlay).await?;
        subject.garden = Self::ours(manner, Duration::from_millis(100));
        subject.reopen().await;
        Some(subject)
    }

    /// A worker whose volumes have the ids of unprivileged containers.
    pub(crate) async fn with_ids() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not applicable: this process is not root");
            return None;
        }
        let volumes = baggageclaim::Server::with_ids(Driver::Overlay).await;
        Some(Self::over(Self::ours(Manner::Containerd, Duration::from_secs(5)), volumes).await)
    }

    /// A worker with the genuine server package.
    pub(crate) async fn genuine() -> Option<Self> {
        let garden = Garden::Genuine(super::genuine::Server::start()?);
        Some(Self::over(garden, baggageclaim::Server::start(Driver::Overlay).await).await)
    }

    async fn over(garden: Garden, volumes: baggageclaim::Server) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let runtime =
            GardenRuntime::open(config(&garden, &volumes, dir.path())).await.expect("open the runtime");
        let image = image(&*runtime).await;
        Self { runtime: Some(runtime), garden, volumes, dir, image, roots: Mutex::new(vec![image]) }
    }
}

/// A volume with a root file system of empty directories. The servers of the tests show this
/// machine's programs there.
pub(crate) async fn image(runtime: &dyn Runtime) -> VolumeHandle {
    let image = VolumeHandle::new();
    runtime.create_volume(image, VolumeSource::Empty).await.expect("make a volume");
    let tree = tempfile::tempdir().expect("a directory");
    for name in ["usr", "bin", "sbin", "lib", "lib64", "dev", "proc", "tmp", "etc"] {
        std::fs::create_dir_all(tree.path().join("rootfs").join(name)).expect("make");
    }
    std::fs::write(tree.path().join("rootfs/etc/passwd"), "root:x:0:0::/root:/bin/sh\n").expect("write");
    let tar = std::process::Command::new("tar").arg("-c").arg("-C").arg(tree.path()).arg("rootfs").output();
    let archive = Box::pin(std::io::Cursor::new(tar.expect("tar is installed").stdout));
    let Contents::Remote(remote) = runtime.contents(image).await.expect("the contents") else {
        panic!("the volumes are local")
    };
    remote.write(Path::new(""), archive).await.expect("write an image");
    image
}

impl GardenSubject {
    /// Replaces the server. Its containers are lost, and volumes stay.
    pub(crate) fn lose_containers(&mut self, manner: Manner) {
        self.garden = Garden::Ours(Server::start(manner));
    }

    /// Another gateway of the same worker, with a separate state directory.
    pub(crate) async fn another(
        &self,
        change: impl FnOnce(GardenConfig) -> GardenConfig,
    ) -> Result<Arc<GardenRuntime>, RuntimeError> {
        let own = self.dir.path().join(VolumeHandle::new().to_string());
        GardenRuntime::open(change(config(&self.garden, &self.volumes, &own))).await
    }

    /// The simulated server.
    pub(crate) fn server(&self) -> &Server {
        match &self.garden {
            Garden::Ours(server) => server,
            Garden::Genuine(_) => panic!("the server is the genuine one"),
        }
    }
}

#[async_trait]
impl Subject for GardenSubject {
    fn runtime(&self) -> Arc<dyn Runtime> {
        Arc::<GardenRuntime>::clone(self.runtime.as_ref().expect("a runtime"))
    }

    async fn reopen(&mut self) {
        drop(self.runtime.take());
        let config = config(&self.garden, &self.volumes, self.dir.path());
        self.runtime = Some(GardenRuntime::open(config).await.expect("open the runtime again"));
    }

    fn keeps_limits(&self) -> bool {
        matches!(self.garden, Garden::Ours(_)) && testing::garden::keeps_limits()
    }

    fn spool_bytes(&self) -> u64 {
        SPOOL
    }

    async fn root(&self) -> Root {
        let (root, parent) = (VolumeHandle::new(), self.image);
        let made = self.runtime().create_volume(root, VolumeSource::CopyOnWrite { parent }).await;
        made.expect("make a root");
        self.roots.lock().expect("no panic").push(root);
        Root::Volume(root)
    }

    fn roots(&self) -> Vec<VolumeHandle> {
        self.roots.lock().expect("no panic").clone()
    }
}
