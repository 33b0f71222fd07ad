//! Attending a Concourse worker.

use std::time::Duration;

use crate::garden::{GardenConfig, GardenRuntime};
use crate::{Config, WorkerSet};

/// Pause after the first failure. It doubles up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Attends a Concourse worker as soon as it can be reached.
pub async fn attend_concourse_worker(gateway: WorkerSet, config: Config, garden: GardenConfig) {
    let mut pause = FIRST_PAUSE;
    loop {
        let opened = async {
            let runtime = GardenRuntime::open(garden.clone()).await?;
            gateway.attend(config.clone(), runtime).await
        };
        tokio::select! {
            opened = opened => match opened {
                Ok(()) => return,
                Err(error) => tracing::warn!(
                    worker.name = config.worker_name,
                    error = format!("{error:#}"),
                    "cannot attend a Concourse worker: trying again"
                ),
            },
            () = gateway.stopped() => return,
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = gateway.stopped() => return,
        }
        pause = LONGEST_PAUSE.min(pause * 2);
    }
}
