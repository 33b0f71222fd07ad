//! Explanation of a lease: its worker, owner and expiry, and why it ended.

use prost_types::Timestamp;
use rpc::Reason;
use rpc::pb::artifacts::{ObjectKind, Relation};
use rpc::pb::scheduler::{GetLeaseRequest, Lease, LeaseState, StopReason, WorkerState};
use serde_json::Value;

use crate::client::connect::{Connection, Service};
use crate::client::queries;
use crate::client::why;
use crate::commands::explain::store;
use crate::ending::error::refusal;
use crate::render::json;
use crate::render::json::relation;
use crate::render::labels;
use crate::render::stdout::{print, print_json};
use crate::render::table::{duration, fields, plain};

/// Maximum length of a line, in characters.
const WIDTH: usize = 1000;

/// Explains a lease and the artifacts that it pins. `false`: there is no lease with this id.
pub(crate) async fn explain(connection: &Connection, id: &str, as_json: bool) -> anyhow::Result<bool> {
    let is_for = |error: &anyhow::Error, reason| refusal(error).is_some_and(|refused| refused.is(reason));
    let lease = match get(connection, id).await {
        Ok(lease) => lease,
        Err(error) if is_for(&error, Reason::LeaseNotFound) => return Ok(false),
        Err(error) => return Err(error),
    };
    let held = match why::explain(connection, id).await {
        // The artifact store records the pins of a lease like those of a workload.
        Ok(held) if held.kind() == ObjectKind::Workload => held.relations,
        Ok(_) => Vec::new(),
        Err(error) if is_for(&error, Reason::UnknownId) => Vec::new(),
        Err(error) => return Err(error),
    };
    // The worker is optional information.
    let worker = queries::worker(connection, "explain", &lease.worker_id).await.ok();
    let contact = worker.map(|worker| worker.state());
    if as_json {
        print_json(&explained(&lease, &held))?
    } else {
        print(&text(&lease, &held, contact))?
    }
    Ok(true)
}

async fn get(connection: &Connection, id: &str) -> anyhow::Result<Lease> {
    let request = GetLeaseRequest { team: connection.team.clone(), lease_id: id.to_owned() };
    let placements = connection.placements();
    let response = connection
        .repeat(Service::Scheduler, "cannot explain the lease", async || {
            placements.clone().get_lease(request.clone()).await
        })
        .await?;
    Ok(response.lease.unwrap_or_default())
}

fn text(lease: &Lease, held: &[Relation], contact: Option<WorkerState>) -> String {
    let worker = match plain(&lease.worker_name, WIDTH) {
        name if name.is_empty() => lease.worker_id.clone(),
        name => format!("{name} ({})", lease.worker_id),
    };
    let at = |at: &Option<Timestamp>| {
        at.as_ref().map(|at| format!("{} ({} ago)", labels::instant(at), labels::ago(Some(at))))
    };
    let ended = at(&lease.ended_at).map(|at| match labels::lease_end(lease.end()) {
        Some(end) => format!("{at}: {end}{}", stopped_for(lease)),
        None => at,
    });
    let relations: Vec<_> = held.iter().map(store::related).collect();
    let mut shown = vec![
        ("lease", lease.lease_id.clone()),
        ("kind", labels::lease_kind(lease.kind())),
        ("state", standing(lease)),
        ("team", lease.team.clone()),
        ("owner", plain(&lease.owner, WIDTH)),
        ("workload", lease.workload_id.clone()),
        ("attempt", lease.attempt_id.clone()),
        ("worker", worker),
        ("reserves", lease.requests.as_ref().map(labels::amounts).unwrap_or_default()),
        ("granted", at(&lease.granted_at).unwrap_or_default()),
        ("until", until(lease, contact)),
        ("ended", ended.unwrap_or_default()),
    ];
    shown.extend(relations.iter().map(|(relation, ids)| (relation.as_str(), ids.clone())));
    fields(&shown)
}

/// Describes the state of a lease.
fn standing(lease: &Lease) -> String {
    let word = labels::lease_state(lease.state());
    match lease.state() {
        LeaseState::Ending => {
            format!("{word} (must stop{}, and keeps its slot until then)", stopped_for(lease))
        }
        _ => word,
    }
}

/// Describes why a lease must stop. Empty: it need not stop.
fn stopped_for(lease: &Lease) -> String {
    match labels::stop_reason(lease.stop_reason()) {
        "" => String::new(),
        why => format!(" because of {why}"),
    }
}

/// Describes the expiry of a lease. Empty: the lease has ended.
fn until(lease: &Lease, contact: Option<WorkerState>) -> String {
    if lease.ended_at.is_some() {
        return String::new();
    }
    match &lease.expires_at {
        Some(_) if lease.state() == LeaseState::Ending => {
            "its processes have stopped, or its worker has a new incarnation or is pruned".to_owned()
        }
        Some(at) => {
            let left = labels::from_now(at).map(|left| format!(" (in {})", duration(left)));
            format!("{}{}, unless the holder renews it", labels::instant(at), left.unwrap_or_default())
        }
        None if lease.stop_reason() == StopReason::WorkerLost => {
            "its process is known to have stopped, or its worker has a new incarnation or is pruned"
                .to_owned()
        }
        None => {
            let silent = contact.filter(|state| matches!(state, WorkerState::Stalled | WorkerState::Lost));
            let silent = silent.map(|state| format!("; the worker is {} now", labels::worker_state(state)));
            format!("the attempt ends, or the worker is lost{}", silent.unwrap_or_default())
        }
    }
}

fn explained(lease: &Lease, held: &[Relation]) -> Value {
    let mut document = json::lease(lease);
    document["placement_kind"] = document["kind"].take();
    document["kind"] = "lease".into();
    document["id"] = lease.lease_id.as_str().into();
    document["relations"] = held.iter().map(relation).collect();
    document
}

#[cfg(test)]
mod tests {
    use rpc::pb::scheduler::{LeaseEnd, PlacementKind, ResourceRequests};

    use super::*;

    const LONG_AGO: Option<Timestamp> = Some(Timestamp { seconds: 0, nanos: 0 });
    const NEVER: Option<Timestamp> = Some(Timestamp { seconds: 253_370_764_800, nanos: 0 });

    fn lines(lease: &Lease, contact: Option<WorkerState>) -> Vec<String> {
        let text = text(lease, &[], contact);
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn granted_lease_has_owner_and_expiry() {
        let mut lease = Lease {
            lease_id: "7".to_owned(),
            team: "main".to_owned(),
            kind: PlacementKind::Get.into(),
            state: LeaseState::Granted.into(),
            worker_id: "w".to_owned(),
            worker_name: "big".to_owned(),
            owner: "check \u{1b}8".to_owned(),
            requests: Some(ResourceRequests { memory_bytes: 1 << 20, ..Default::default() }),
            expires_at: NEVER,
            ..Lease::default()
        };
        let printed = lines(&lease, None);
        assert_eq!(
            printed[..7],
            [
                "lease: 7",
                "kind: get",
                "state: granted",
                "team: main",
                "owner: check ?8",
                "worker: big (w)",
                "reserves: 1.0 MiB",
            ]
        );
        assert!(
            printed[7].starts_with("until: 9999-01-01T00:00:00Z (in ")
                && printed[7].ends_with(", unless the holder renews it"),
            "{printed:?}"
        );
        let of_a_workload = Lease { expires_at: None, workload_id: "8".to_owned(), ..lease.clone() };
        let printed = lines(&of_a_workload, Some(WorkerState::Stalled));
        assert!(printed.contains(&"workload: 8".to_owned()), "{printed:?}");
        assert_eq!(
            printed.last().map(String::as_str),
            Some("until: the attempt ends, or the worker is lost; the worker is stalled now")
        );
        lease.state = LeaseState::Ending.into();
        lease.stop_reason = StopReason::Released.into();
        let printed = lines(&lease, None);
        assert!(printed[2].starts_with("state: ending (must stop because of RELEASED, "), "{printed:?}");
        assert!(printed[7].starts_with("until: its processes have stopped"), "{printed:?}");
    }

    #[test]
    fn ended_lease_has_time_and_reason() {
        let ended = |end: LeaseEnd| {
            let lease = Lease {
                lease_id: "7".to_owned(),
                state: LeaseState::Ended.into(),
                expires_at: LONG_AGO,
                ended_at: LONG_AGO,
                end: end.into(),
                ..Lease::default()
            };
            lines(&lease, None).pop().expect("a line")
        };
        let printed = ended(LeaseEnd::Released);
        assert!(
            printed.starts_with("ended: 1970-01-01T00:00:00Z (")
                && printed.ends_with(" ago): its holder released it")
        );
        assert!(ended(LeaseEnd::Expired).ends_with("ago): its holder did not renew it in time"));
    }
}
