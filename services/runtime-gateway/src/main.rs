//! The runtime gateway as a process of its own.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Before any thread exists: a container is made by a process that has only one.
    if let Some(code) = runtime_gateway::host::supervise_if_asked(std::env::args_os()) {
        return code;
    }
    eprintln!("runtime-gateway: serving is not built in yet; `gantry up` runs it");
    ExitCode::FAILURE
}
