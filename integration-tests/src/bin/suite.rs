//! Suite for other programs: the four services as separate processes on PostgreSQL, a proxy and two
//! host workers.
//!
//! The suite runs until its standard input ends or a signal arrives, and then removes everything.
//! Once all services are ready, it prints a line of JSON: `server`, the value for
//! `gantry --server`, and `token_file`. With `--walled`, the gateways of the workers reject that
//! token, and only the proxy accepts it.

use std::io::{self, Write};

use integration_tests::suite::{Shape, Suite};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

const SHAPE: Shape = Shape { gateways: 2, proxies: 1, ..Shape::ONE };

fn main() -> io::Result<()> {
    let walled = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => false,
        [walled] if walled == "--walled" => true,
        _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "usage: suite [--walled]")),
    };
    // PostgreSQL ends with this thread, so this thread waits.
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _entered = tokio.enter();
    // From here on, a signal ends the process only after the cleanup.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let suite = if walled { Suite::start_walled(SHAPE, &[]) } else { Suite::start(SHAPE, &[]) };
    let found = serde_json::json!({ "server": suite.server(), "token_file": suite.path("token") });
    writeln!(io::stdout(), "{found}")?;

    let (end, ended) = oneshot::channel();
    std::thread::spawn(move || {
        // The end of the input, or an error, ends the suite.
        io::copy(&mut io::stdin(), &mut io::sink()).ok();
        end.send(()).ok();
    });
    tokio.block_on(async {
        tokio::select! {
            _ = ended => {}
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    });
    Ok(())
}
