//! Specs for unit tests.

use domain::workload::{Image, Limits, Network, OutputMode, Stdin, WorkloadKind, WorkloadSpec};

/// Returns a spec that needs no artifact store and no special worker.
pub(crate) fn spec() -> WorkloadSpec {
    WorkloadSpec {
        team: "main".to_owned(),
        kind: WorkloadKind::Task,
        image: Image::Host,
        entrypoint: None,
        prefers_image_directory: false,
        command: vec![b"true".to_vec()],
        environment: vec![],
        directory: b"/workspace".to_vec(),
        user: None,
        stdin: Stdin::None,
        output: OutputMode::Spooled,
        inputs: vec![],
        outputs: vec![],
        limits: Limits::default(),
        privileged: false,
        network: Network::Private,
        tags: vec![],
        platform: "linux".to_owned(),
        queue_timeout: None,
        run_timeout: None,
        build: None,
        caches: vec![],
        interruptible: false,
        capabilities: vec![],
        priority: 0,
        requests: Default::default(),
        start_timeout: None,
        retries: 0,
        worker: String::new(),
        terminal: None,
        keep_result: false,
        services: Vec::new(),
        name: String::new(),
    }
}
