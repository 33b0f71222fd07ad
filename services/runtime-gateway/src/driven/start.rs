//! Start of the main process of a driven container.

use std::sync::Arc;

use domain::AttemptId;
use runtime::{ProcessRole, ProcessSpec};

use super::hold::attend;
use super::{DrivenError, Held};
use crate::attempt::context::AttemptContext;
use crate::attempt::error::AttemptError;

/// Starts the main process of a container, or finds it if it was started before.
pub(crate) async fn start(
    context: &Arc<AttemptContext>,
    held: Held,
    id: AttemptId,
    spec: ProcessSpec,
) -> Result<(), DrivenError> {
    let worker = &context.worker;
    // Nothing is published meanwhile.
    let _one_at_a_time = context.admissions.lock(id.uuid()).await;
    let container = held.container(worker, id).await?;
    if !worker.session.is_exclusive() {
        return Err(AttemptError::NotExclusive.into());
    }
    let modes = (spec.stdin.clone(), spec.output);
    let spec = ProcessSpec { role: ProcessRole::Main, ..spec };
    worker.runtime.start(container.handle, id.into(), spec).await?;
    drop(held);
    worker.tasks.spawn(attend(context.clone(), id, modes));
    tracing::info!(process.id = %id, container.handle = %container.handle, "main process started by a caller");
    Ok(())
}
