//! Runs the four services as processes of their own, on PostgreSQL, with a proxy and two host workers, until its standard input ends or it is
//! told to end. Nothing of it is left then.
//!
//! Once all are ready it prints a line of JSON: `server`, as `gantry --server` takes it, and `token_file`. With `--walled` that token opens the
//! proxy only: the workers' gateways want another one.

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
    // PostgreSQL lives as long as this thread, which therefore does the waiting.
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _entered = tokio.enter();
    // From here on a signal is not the end before all is tidied up.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let suite = if walled { Suite::start_walled(SHAPE, &[]) } else { Suite::start(SHAPE, &[]) };
    let found = serde_json::json!({ "server": suite.server(), "token_file": suite.path("token") });
    writeln!(io::stdout(), "{found}")?;

    let (end, ended) = oneshot::channel();
    std::thread::spawn(move || {
        // Read to its end, or not readable: nobody wants the suite any more.
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
