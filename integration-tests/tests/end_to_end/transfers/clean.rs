//! Cleanup of a worker whose gateway is a separate process.

use std::path::PathBuf;

use integration_tests::gantry_binary;
use runtime::{Runtime as _, RuntimeError};
use runtime_gateway::host::{HostConfig, HostRuntime};

/// Destroys the containers and volumes of a worker with these directories, which has no gateway any
/// more.
pub(crate) async fn clean(state: PathBuf, run: PathBuf) {
    let config = HostConfig {
        supervisor: gantry_binary().with_file_name("runtime-gateway"),
        ..HostConfig::new(state, run).expect("a path")
    };
    let machine = HostRuntime::open(config).expect("not in use");
    let held = machine.list().await.expect("list");
    for container in held.containers {
        machine.destroy_container(container).await.expect("destroy a container");
    }
    // Children must be removed before their parents, and the relation is not listed.
    let mut volumes = held.volumes;
    while !volumes.is_empty() {
        let mut parents = Vec::new();
        for volume in volumes.iter().rev() {
            match machine.destroy_volume(*volume).await {
                Ok(()) => {}
                Err(RuntimeError::HasChildren(_)) => parents.push(*volume),
                Err(error) => panic!("destroy a volume: {error:?}"),
            }
        }
        assert!(parents.len() < volumes.len(), "{parents:?} have children that are not listed");
        volumes = parents;
    }
}
