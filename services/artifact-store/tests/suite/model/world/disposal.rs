//! Deletions that gateways and operators request.

use rpc::pb::artifacts as pb;
use uuid::Uuid;

use super::World;
use crate::Callers;
use crate::model::operations::Operation;
use crate::model::state::{Outcome, State};

impl World {
    /// Marks items of an attempt. Skips attempts without items.
    pub(super) async fn dispose(&self, state: &State, operation: &Operation) -> Outcome {
        use Operation as O;
        let (O::Fail { workload, attempt }
        | O::MarkContainer { workload, attempt, .. }
        | O::MarkVolume { workload, attempt, .. }) = *operation
        else {
            return Outcome::Skipped;
        };
        let Some((worker, containers, volumes)) = state.things_of(workload, attempt) else {
            return Outcome::Skipped;
        };
        let credential = |gateway: bool| match gateway {
            true => self.speaker(worker).gateway.credential,
            false => String::new(),
        };
        let text = |id: Option<&Uuid>| id.map(ToString::to_string).unwrap_or_default();
        let why = "it is in the way".to_owned();
        match *operation {
            O::MarkContainer { gateway, .. } => {
                let Some(container) = containers.first() else { return Outcome::Skipped };
                let request = pb::MarkContainerRequest {
                    session_credential: credential(gateway),
                    container_handle: container.to_string(),
                    reason: why,
                };
                let mark = |callers: Callers| {
                    let request = request.clone();
                    async move { Ok(callers.inventory().mark_container(request).await.map(drop)?) }
                };
                let answer = self.ask(mark).await;
                Outcome::Disposed { containers: vec![*container], volumes: Vec::new(), answer }
            }
            O::MarkVolume { which, gateway, .. } => {
                let which = usize::from(which).checked_rem(volumes.len());
                let Some(volume) = which.and_then(|which| volumes.get(which)) else {
                    return Outcome::Skipped;
                };
                let request = pb::MarkVolumeRequest {
                    session_credential: credential(gateway),
                    volume_handle: volume.to_string(),
                    reason: why,
                };
                let mark = |callers: Callers| {
                    let request = request.clone();
                    async move { Ok(callers.inventory().mark_volume(request).await.map(drop)?) }
                };
                let answer = self.ask(mark).await;
                Outcome::Disposed { containers, volumes: vec![*volume], answer }
            }
            _ => {
                let request = pb::FailPrepareRequest {
                    session_credential: credential(true),
                    container_handle: text(containers.first()),
                    volume_handles: volumes.iter().map(ToString::to_string).collect(),
                    reason: why,
                };
                let fail = |callers: Callers| {
                    let request = request.clone();
                    async move { Ok(callers.inventory().fail_prepare(request).await.map(drop)?) }
                };
                let answer = self.ask(fail).await;
                Outcome::Disposed { containers, volumes, answer }
            }
        }
    }
}
