//! Publishing the outputs of an attempt.

use std::path::Path;

use domain::workload::{Failure, PublishedOutput};
use runtime::RuntimeError;

use super::context::AttemptContext;
use super::error::AttemptError;
use super::inputs::AttemptHandles;
use super::spec_plan::Plan;
use crate::clients::scheduler::AttemptResult;
use crate::clients::scheduler_messages::AttemptTask;
use crate::transfer::completion::report_complete;
use crate::transfer::manifests::ScanResult;

/// Scans the outputs, and publishes them as candidates of this attempt.
pub(crate) async fn publish(
    context: &AttemptContext,
    task: &AttemptTask,
    plan: &Plan,
    prepared: &AttemptHandles,
    result: &mut AttemptResult,
) -> Result<(), AttemptError> {
    let AttemptContext { worker, transfers, .. } = context;
    for output in &plan.outputs {
        let (handle, _) = prepared.volumes[output.volume];
        if let Some((scratch, directory)) = &output.taken_from {
            let from = prepared.volumes[*scratch].0;
            match worker.runtime.take_directory(from, directory, handle).await {
                Ok(()) => {}
                Err(error @ RuntimeError::OutputMissing(_)) => {
                    let message = if directory == Path::new(&output.name) {
                        format!("output {error}")
                    } else {
                        format!("output {:?}: {error}", output.name)
                    };
                    result.add_failure(Failure { reason: error.reason(), message });
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
        }
        let scanned = transfers.manifests.scan_all(worker.runtime.as_ref(), handle, &task.spec.team).await;
        let ScanResult { manifest, omitted } = match scanned {
            Ok(scanned) => scanned,
            Err(error @ (RuntimeError::InvalidOutput(_) | RuntimeError::UnreadableOutput(_))) => {
                let message = format!("output {:?}: {error}", output.name);
                result.add_failure(Failure { reason: error.reason(), message });
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        result.notes.extend(omitted.map(|entries| format!("output {:?}: left out: {entries}", output.name)));
        report_complete(transfers, handle, &manifest).await?;
        result.outputs.push(PublishedOutput {
            name: output.name.clone(),
            artifact: output.artifact,
            size_bytes: manifest.size_bytes(),
            digest: manifest.tree_digest(),
            entries: u64::try_from(manifest.entries().len()).unwrap_or(u64::MAX).saturating_sub(1),
        });
    }
    Ok(())
}
