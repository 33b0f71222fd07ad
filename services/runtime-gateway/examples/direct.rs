//! A benchmark of the host runtime without services: it runs `true` in a container.
//!
//! It prints the milliseconds of each run. `make bench` compares them with `gantry run -- true`.
//! With the argument `none`, the container has no network.

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use domain::workload::{Limits, Network, OutputMode, Stdin};
use domain::{ContainerHandle, ProcessId};
use runtime::{ContainerSpec, ProcessSpec, Root, Runtime};
use runtime_gateway::host::{
    HostConfig, HostRuntime, Permission, Policy, enter_user_namespace, supervise_if_asked,
};

fn main() -> ExitCode {
    if let Some(code) = supervise_if_asked(std::env::args_os()) {
        return code;
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(directory), Some(runs)) = (arguments.next(), arguments.next()) else {
        anyhow::bail!("usage: direct DIRECTORY RUNS [none]");
    };
    let network = if arguments.next().as_deref() == Some("none") { Network::None } else { Network::Private };
    enter_user_namespace(std::path::Path::new(&directory))?;
    measure(&directory, runs.parse()?, network)
}

#[tokio::main]
async fn measure(directory: &str, runs: usize, network: Network) -> anyhow::Result<()> {
    let runtime = HostRuntime::open(HostConfig {
        policy: Policy::allowing([Permission::HostImage]),
        ..HostConfig::new(format!("{directory}/state"), format!("{directory}/run"))?
    })?;
    for _ in 0..runs {
        let begin = Instant::now();
        let (container, process) = (ContainerHandle::new(), ProcessId::new());
        let spec = ContainerSpec {
            environment: Vec::new(),
            team: "main".to_owned(),
            root: Root::Host,
            mounts: Vec::new(),
            directory: b"/workspace".to_vec(),
            user: None,
            limits: Limits::default(),
            privileged: false,
            network_of: None,
            local_names: Vec::new(),
            stop_signal: None,
            network,
            note: String::new(),
        };
        runtime.create_container(container, spec).await?;
        let command = ProcessSpec {
            directory: None,
            user: None,
            role: runtime::ProcessRole::Main,
            command: vec![b"true".to_vec()],
            environment: Vec::new(),
            stdin: Stdin::None,
            output: OutputMode::Attached,
            terminal: None,
        };
        runtime.start(container, process, command).await?;
        runtime.wait(process).await?;
        writeln!(std::io::stdout(), "{:.3}", begin.elapsed().as_secs_f64() * 1e3)?;
        runtime.destroy_container(container).await?;
    }
    Ok(())
}
