//! The plan of an attempt: its volumes and their mounts, derived from the spec alone.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use domain::workload::{Bytes, Image, WorkloadSpec};
use domain::{ArtifactId, CacheId, WorkloadId};

use crate::clients::store::{VolumePurpose, VolumeRequest};

/// The volumes of an attempt, and their use.
pub(crate) struct Plan {
    pub(crate) volumes: Vec<PlannedVolume>,
    pub(crate) outputs: Vec<PlannedOutput>,
    pub(crate) caches: Vec<PlannedCache>,
    /// The root file system.
    pub(crate) image: PlannedImage,
}

/// The root file system of the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlannedImage {
    /// The root file system of the worker.
    Host,
    /// The image in the volume with this index.
    Artifact(usize),
    /// The whole volume with this index, which is worker-provided.
    WorkerProvided(usize),
}

/// The imported worker-provided artifacts that a container uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct WorkerImports {
    /// The image of the resource type that the spec names, or the pulled image of its reference.
    pub(crate) image: Option<ArtifactId>,
    /// The certificates of the worker.
    pub(crate) certs: Option<ArtifactId>,
}

/// Path of the worker's certificates in containers, unless the spec mounts something there.
pub(crate) const CERTS: &[u8] = b"/etc/ssl/certs";

pub(crate) struct PlannedVolume {
    pub(crate) name: String,
    pub(crate) purpose: VolumePurpose,
    pub(crate) from: Option<ArtifactId>,
    /// The task cache whose latest version the volume starts with.
    pub(crate) from_cache: Option<CacheId>,
    pub(crate) becomes: Option<ArtifactId>,
    /// Mount path, and whether it is read-only. `None`: the volume is filled later, or is the root.
    pub(crate) mount: Option<(Bytes, bool)>,
    /// Directories that are created in the volume before the start.
    pub(crate) directories: Vec<PathBuf>,
}

impl PlannedVolume {
    /// Creates a plan for an empty volume that is not mounted.
    pub(crate) fn new(name: impl Into<String>, purpose: VolumePurpose) -> Self {
        Self {
            name: name.into(),
            purpose,
            from: None,
            from_cache: None,
            becomes: None,
            mount: None,
            directories: Vec::new(),
        }
    }

    /// Returns the request for the row of the volume.
    pub(crate) fn request(&self) -> VolumeRequest {
        VolumeRequest {
            name: self.name.clone(),
            purpose: self.purpose,
            from: self.from,
            from_cache: self.from_cache,
            becomes: self.becomes,
        }
    }
}

pub(crate) struct PlannedCache {
    pub(crate) cache: CacheId,
    /// The artifact that the cache becomes, if it is changed.
    pub(crate) artifact: ArtifactId,
    /// Index of the volume.
    pub(crate) volume: usize,
}

pub(crate) struct PlannedOutput {
    pub(crate) name: String,
    pub(crate) artifact: ArtifactId,
    /// Index of the volume.
    pub(crate) volume: usize,
    /// Index of the scratch volume, and the directory in it that becomes the output. `None`: the
    /// process writes to the output's volume directly.
    pub(crate) taken_from: Option<(usize, PathBuf)>,
}

impl Plan {
    /// Plans the volumes of an attempt.
    ///
    /// If outputs are `replaceable`, those below `/workspace` are directories of one scratch
    /// volume. So a process may remove or replace them. All other outputs are mounts.
    pub(crate) fn new(
        spec: &WorkloadSpec,
        workload: WorkloadId,
        replaceable: bool,
        imports: &WorkerImports,
    ) -> Self {
        let mut volumes = Vec::new();
        let mut outputs = Vec::new();
        let in_workspace = |path: &Bytes| {
            let relative = path.strip_prefix(rpc::spec::DEFAULT_DIRECTORY)?.strip_prefix(b"/")?;
            Some(PathBuf::from(OsString::from_vec(relative.to_vec())))
        };
        let mount_paths = spec
            .inputs
            .iter()
            .map(|input| &input.path)
            .chain(spec.outputs.iter().map(|output| &output.path))
            .chain(spec.caches.iter().map(|cache| &cache.path));
        if mount_paths.clone().any(|path| in_workspace(path).is_some()) {
            volumes.push(PlannedVolume {
                mount: Some((rpc::spec::DEFAULT_DIRECTORY.to_vec(), false)),
                ..PlannedVolume::new("workspace", VolumePurpose::Scratch)
            });
        }
        let image = |from| PlannedVolume { from, ..PlannedVolume::new("image", VolumePurpose::Input) };
        let image = match &spec.image {
            Image::Host => PlannedImage::Host,
            Image::Artifact(artifact) => {
                volumes.push(image(Some(*artifact)));
                PlannedImage::Artifact(volumes.len() - 1)
            }
            Image::Reference(_) => {
                volumes.push(image(imports.image));
                PlannedImage::Artifact(volumes.len() - 1)
            }
            Image::ResourceType(_) => {
                volumes.push(image(imports.image));
                PlannedImage::WorkerProvided(volumes.len() - 1)
            }
        };
        if imports.certs.is_some() && !mount_paths.clone().any(|path| path == CERTS) {
            volumes.push(PlannedVolume {
                from: imports.certs,
                mount: Some((CERTS.to_vec(), true)),
                ..PlannedVolume::new("certs", VolumePurpose::Input)
            });
        }
        for input in &spec.inputs {
            if spec.outputs.iter().any(|output| output.path == input.path) {
                continue;
            }
            volumes.push(PlannedVolume {
                from: Some(input.artifact),
                mount: Some((input.path.clone(), input.read_only)),
                ..PlannedVolume::new(format!("input/{}", input.name), VolumePurpose::Input)
            });
        }
        for output in &spec.outputs {
            let artifact = workload.output_artifact(&output.name);
            let input = spec.inputs.iter().find(|input| input.path == output.path);
            let taken_from = match (input, in_workspace(&output.path)) {
                (None, Some(relative)) if replaceable => Some((0, relative)),
                _ => None,
            };
            if let Some((scratch, directory)) = &taken_from {
                volumes[*scratch].directories.push(directory.clone());
            }
            outputs.push(PlannedOutput {
                name: output.name.clone(),
                artifact,
                volume: volumes.len(),
                taken_from: taken_from.clone(),
            });
            volumes.push(PlannedVolume {
                from: input.map(|input| input.artifact),
                becomes: Some(artifact),
                mount: taken_from.is_none().then(|| (output.path.clone(), false)),
                ..PlannedVolume::new(format!("output/{}", output.name), VolumePurpose::Output)
            });
        }
        let mut caches = Vec::with_capacity(spec.caches.len());
        for mount in &spec.caches {
            let artifact = workload.cache_artifact(mount.cache);
            caches.push(PlannedCache { cache: mount.cache, artifact, volume: volumes.len() });
            volumes.push(PlannedVolume {
                from_cache: Some(mount.cache),
                becomes: Some(artifact),
                mount: Some((mount.path.clone(), false)),
                ..PlannedVolume::new(format!("cache/{}", mount.cache), VolumePurpose::Output)
            });
        }
        Self { volumes, outputs, caches, image }
    }
}

#[cfg(test)]
mod tests {
    use domain::workload::{Input, Limits, Network, Output, OutputMode, Stdin, WorkloadKind};

    use super::*;

    fn spec() -> WorkloadSpec {
        let input = |name: &str, path: &str| Input {
            name: name.to_owned(),
            artifact: ArtifactId::new(),
            path: path.into(),
            read_only: false,
        };
        let output =
            |name: &str, path: &str| Output { name: name.to_owned(), path: path.into(), owners: Vec::new() };
        WorkloadSpec {
            team: "main".to_owned(),
            kind: WorkloadKind::Task,
            image: Image::Artifact(ArtifactId::new()),
            entrypoint: None,
            prefers_image_directory: false,
            command: vec![b"true".to_vec()],
            environment: Vec::new(),
            directory: rpc::spec::DEFAULT_DIRECTORY.to_vec(),
            user: None,
            stdin: Stdin::None,
            output: OutputMode::Spooled,
            inputs: vec![input("src", "/workspace/src")],
            outputs: vec![
                output("src", "/workspace/src"),
                output("out", "/workspace/out"),
                output("far", "/far"),
            ],
            limits: Limits::default(),
            privileged: false,
            network: Network::Private,
            tags: Vec::new(),
            platform: "linux".to_owned(),
            queue_timeout: None,
            run_timeout: None,
            build: None,
            caches: Vec::new(),
            interruptible: false,
            priority: 0,
            requests: Default::default(),
            start_timeout: None,
            retries: 0,
            worker: String::new(),
            capabilities: vec![],
            terminal: None,
            keep_result: false,
            services: Vec::new(),
            name: String::new(),
        }
    }

    #[test]
    fn outputs_are_mounts_unless_replaceable() {
        let spec = spec();
        for replaceable in [true, false] {
            let plan = Plan::new(&spec, WorkloadId::new(), replaceable, &WorkerImports::default());
            let of = |name: &str| {
                let output = plan.outputs.iter().find(|output| output.name == name).expect("an output");
                (plan.volumes[output.volume].mount.clone().map(|(path, _)| path), output.taken_from.clone())
            };
            let mounted = |path: &str| (Some(path.as_bytes().to_vec()), None);
            // An output with the path of an input is always a mount, and so is an output outside of
            // the workspace.
            assert_eq!((of("src"), of("far")), (mounted("/workspace/src"), mounted("/far")));
            let scratch = &plan.volumes[0];
            assert_eq!(scratch.mount.as_ref().map(|(path, _)| &path[..]), Some(&b"/workspace"[..]));
            if replaceable {
                assert_eq!(of("out"), (None, Some((0, "out".into()))));
                assert_eq!(scratch.directories, [PathBuf::from("out")]);
            } else {
                assert_eq!(of("out"), mounted("/workspace/out"));
                assert!(scratch.directories.is_empty());
            }
        }
    }

    #[test]
    fn cache_starts_with_its_latest_version() {
        let (workload, [near, far]) = (WorkloadId::new(), [CacheId::new(), CacheId::new()]);
        let mount = |cache, path: &str| domain::workload::CacheMount { cache, path: path.into() };
        let caches = vec![mount(near, "/workspace/target"), mount(far, "/root/.cargo")];
        let plan = Plan::new(
            &WorkloadSpec { inputs: vec![], outputs: vec![], caches, ..spec() },
            workload,
            true,
            &WorkerImports::default(),
        );
        assert_eq!(plan.volumes[0].name, "workspace", "one of them is in it");
        for (planned, (cache, path)) in
            plan.caches.iter().zip([(near, "/workspace/target"), (far, "/root/.cargo")])
        {
            let volume = &plan.volumes[planned.volume];
            assert_eq!((volume.from_cache, volume.from, planned.cache), (Some(cache), None, cache));
            assert_eq!(volume.becomes, Some(workload.cache_artifact(cache)));
            assert_eq!(volume.mount, Some((path.into(), false)));
        }
        assert_ne!(plan.caches[0].artifact, plan.caches[1].artifact);
    }

    #[test]
    fn image_is_an_unmounted_child_of_its_replica() {
        let spec = spec();
        let imports = WorkerImports { image: Some(ArtifactId::new()), certs: None };
        let with = |image| {
            let plan = Plan::new(&WorkloadSpec { image, ..spec.clone() }, WorkloadId::new(), true, &imports);
            (plan.image, plan.volumes)
        };
        let Image::Artifact(artifact) = spec.image.clone() else { panic!("an artifact") };
        let (PlannedImage::Artifact(index), volumes) = with(spec.image.clone()) else { panic!("an image") };
        let image = &volumes[index];
        assert_eq!((image.from, image.becomes, &image.mount), (Some(artifact), None, &None));
        assert!(spec.artifacts().contains(&artifact), "it is pinned");
        assert_eq!(with(Image::Host).0, PlannedImage::Host);
        let (PlannedImage::WorkerProvided(index), volumes) = with(Image::ResourceType("git".to_owned()))
        else {
            panic!("an image")
        };
        let image = &volumes[index];
        assert_eq!((image.from, image.becomes, &image.mount), (imports.image, None, &None));
        assert_eq!(image.purpose, VolumePurpose::Input);
    }

    #[test]
    fn certs_are_mounted_unless_spec_mounts_there() {
        let imports = WorkerImports { image: None, certs: Some(ArtifactId::new()) };
        let certs = |spec: &WorkloadSpec, imports: &WorkerImports| {
            let plan = Plan::new(spec, WorkloadId::new(), true, imports);
            let certs = plan.volumes.into_iter().find(|volume| volume.name == "certs");
            certs.map(|volume| (volume.from, volume.mount))
        };
        let mut spec = spec();
        let mounted = (imports.certs, Some((CERTS.to_vec(), true)));
        assert_eq!(certs(&spec, &imports), Some(mounted));
        assert_eq!(certs(&spec, &WorkerImports::default()), None);
        spec.inputs[0].path = CERTS.to_vec();
        assert_eq!(certs(&spec, &imports), None);
    }
}
