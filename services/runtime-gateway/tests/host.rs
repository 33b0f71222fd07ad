//! The host runtime, on this machine.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::workload::{Image, Limits, Network, OutputMode, Stdin};
use domain::{AttemptId, ContainerHandle};
use futures::StreamExt;
use runtime::{ContainerSpec, Offsets, ProcessEvent, ProcessSpec, Runtime};
use runtime_gateway::host::{HostConfig, HostRuntime};

fn config(dir: &Path) -> HostConfig {
    HostConfig {
        state_dir: dir.join("state"),
        runtime_dir: dir.join("run"),
        supervisor: env!("CARGO_BIN_EXE_runtime-gateway").into(),
        spool_bytes: 32 << 20,
        masked: Vec::new(),
    }
}

fn container() -> ContainerSpec {
    ContainerSpec {
        image: Image::Host,
        mounts: vec![],
        directory: b"/".to_vec(),
        user: None,
        limits: Limits::default(),
        privileged: false,
        network: Network::Host,
    }
}

fn process(command: &[&str]) -> ProcessSpec {
    ProcessSpec {
        command: command.iter().map(|text| text.as_bytes().to_vec()).collect(),
        environment: vec![],
        stdin: Stdin::None,
        output: OutputMode::Attached,
    }
}

#[tokio::test]
async fn smoke() {
    let dir = tempfile::tempdir().unwrap();
    let runtime: Arc<HostRuntime> = HostRuntime::open(config(dir.path())).unwrap();
    println!("{:?}", runtime.capabilities());
    println!("{:?}", runtime.marker().await.unwrap());
    for command in [
        &["true"][..],
        &["sh", "-c", "exit 3"],
        &["nonesuch"],
        &["/etc/passwd"],
        &[
            "sh",
            "-c",
            "id; cat /proc/self/status | grep -E 'Cap|Sec|NoNew'; ls -la / /root /dev /run; cat /proc/self/mountinfo; hostname; ps ax; env; mount -t tmpfs x /mnt; echo err >&2",
        ],
    ] {
        let (c, p) = (ContainerHandle::new(), AttemptId::new());
        let begin = Instant::now();
        runtime.create_container(c, container()).await.unwrap();
        let created = begin.elapsed();
        runtime.start(c, p, process(command)).await.unwrap();
        let started = begin.elapsed();
        let ended = tokio::time::timeout(Duration::from_secs(10), runtime.wait(p)).await.unwrap().unwrap();
        println!("{command:?} {ended:?} created {created:?} started {started:?} ended {:?}", begin.elapsed());
        let mut attachment = runtime.attach(p, Offsets::default()).await.unwrap();
        while let Some(event) = attachment.events.next().await {
            match event.unwrap() {
                ProcessEvent::Output { stream, data, .. } => {
                    println!("{stream:?}: {}", String::from_utf8_lossy(&data))
                }
                other => println!("{other:?}"),
            }
        }
        let begin = Instant::now();
        println!(
            "log: {}",
            std::fs::read_to_string(dir.path().join(format!("state/containers/{c}/processes/{p}/log")))
                .unwrap()
        );
        runtime.destroy_container(c).await.unwrap();
        println!("destroyed {:?}", begin.elapsed());
    }
}
