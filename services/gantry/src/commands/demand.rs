//! `gantry demand`: demand for workers, supply of workers, and the workers that can be removed with
//! the least harm.

use rpc::pb::scheduler::{
    GetDemandRequest, GetDemandResponse, RemovableWorker, ReplicaCheck, TeamWorkers, WaitingShape,
    WorkerShape, WouldLose,
};
use serde_json::{Value, json};

use crate::client::connect::{Connection, Service};
use crate::render::json::requests;
use crate::render::labels;
use crate::render::stdout::{print, print_json};
use crate::render::table::{filled, plain};

/// Maximum width of a cell, in characters.
const WIDTH: usize = 200;

/// Executes `gantry demand`.
pub(crate) async fn demand(connection: &Connection, as_json: bool) -> anyhow::Result<()> {
    let (placements, request) = (
        connection.placements(),
        GetDemandRequest { replica_check: ReplicaCheck::Each.into(), ..Default::default() },
    );
    let response = connection
        .repeat(Service::Scheduler, "cannot read the demand", async || {
            placements.clone().get_demand(request).await
        })
        .await?;
    if as_json { print_json(&document(&response)) } else { print(&text(&response)) }
}

fn text(response: &GetDemandResponse) -> String {
    let GetDemandResponse { waiting, waiting_unplaceable, oldest_since, demand, supply, removable, refused } =
        response;
    let mut text = match (waiting, waiting_unplaceable) {
        (0, _) => "no workload or lease waits for a worker\n".to_owned(),
        (count, none) => {
            let of_these = match none {
                0 => String::new(),
                none => format!("; no existing worker can take {none} of them"),
            };
            let oldest = labels::ago(oldest_since.as_ref());
            format!("{count} waiting for a worker, the oldest for {oldest}{of_these}\n")
        }
    };
    if !demand.is_empty() {
        text.push('\n');
        text.push_str(&shapes(demand));
    }
    if !refused.is_empty() {
        text.push_str("\nRefused in the last 10 minutes because no worker could ever take it\n");
        text.push_str(&shapes(refused));
    }
    if supply.is_empty() {
        text.push_str("\nno worker is in contact\n");
    } else {
        let header = [
            "WORKERS",
            "IN SERVICE",
            "IDLE",
            "USED SLOTS",
            "FREE",
            "TEAM",
            "PLATFORM",
            "TAGS",
            "IMAGES",
            "CAPABILITIES",
        ];
        text.push('\n');
        text.push_str(&filled(&header, &supply.iter().map(supply_row).collect::<Vec<_>>()));
    }
    if !removable.is_empty() {
        text.push_str("\nWorkers to remove, the one with the least harm first\n");
        text.push_str(&filled(
            &["WORKER", "REASON"],
            &removable.iter().map(removable_row).collect::<Vec<_>>(),
        ));
    }
    text
}

/// Formats requirements, with the reasons for which no worker can ever meet them.
fn shapes(shapes: &[WaitingShape]) -> String {
    let header = [
        "COUNT",
        "OLDEST",
        "TEAM",
        "PLATFORM",
        "TAGS",
        "IMAGE",
        "CAPABILITIES",
        "RESERVES",
        "WAITS FOR",
        "NEVER",
    ];
    let mut text = filled(&header, &shapes.iter().map(waiting_row).collect::<Vec<_>>());
    for why in shapes.iter().flat_map(|shape| &shape.never_for) {
        text.push_str(&format!("  {}\n", plain(why, 5 * WIDTH)));
    }
    text
}

fn waiting_row(shape: &WaitingShape) -> Vec<String> {
    let process = shape.process.clone().unwrap_or_default();
    let image = match process.resource_type.as_str() {
        "" => process.image_kind,
        name => name.to_owned(),
    };
    let own = if shape.team_workers() == TeamWorkers::Own { " (only its own)" } else { "" };
    vec![
        shape.count.to_string(),
        labels::ago(shape.oldest_since.as_ref()),
        format!("{}{own}", plain(&shape.team, WIDTH)),
        plain(&shape.platform, WIDTH),
        plain(&shape.tags.join(", "), WIDTH),
        plain(&image, WIDTH),
        plain(&process.capabilities.join(", "), WIDTH),
        shape.requests.as_ref().map(labels::amounts).unwrap_or_default(),
        plain(&shape.waits_for, WIDTH),
        if shape.count_unplaceable > 0 { shape.count_unplaceable.to_string() } else { String::new() },
    ]
}

fn supply_row(shape: &WorkerShape) -> Vec<String> {
    let free = match (shape.slots_free, shape.workers_without_limit) {
        (free, 0) => free.to_string(),
        (_, without) if without == shape.workers_in_service => "no limit".to_owned(),
        (free, without) => format!("{free}, and {without} without limit"),
    };
    vec![
        shape.workers.to_string(),
        shape.workers_in_service.to_string(),
        shape.workers_idle.to_string(),
        shape.slots_in_use.to_string(),
        free,
        plain(&shape.team, WIDTH),
        plain(&shape.platform, WIDTH),
        plain(&shape.tags.join(", "), WIDTH),
        plain(&shape.image_kinds.join(", "), WIDTH),
        plain(&shape.capabilities.join(", "), WIDTH),
    ]
}

fn removable_row(worker: &RemovableWorker) -> Vec<String> {
    vec![plain(&worker.worker_name, WIDTH), plain(&worker.reason, 3 * WIDTH)]
}

fn document(response: &GetDemandResponse) -> Value {
    json!({
        "waiting": response.waiting,
        "waiting_unplaceable": response.waiting_unplaceable,
        "oldest_since": response.oldest_since.as_ref().map(labels::instant),
        "demand": response.demand.iter().map(waiting).collect::<Vec<_>>(),
        "supply": response.supply.iter().map(supply).collect::<Vec<_>>(),
        "removable": response.removable.iter().map(removable).collect::<Vec<_>>(),
        "refused": response.refused.iter().map(waiting).collect::<Vec<_>>(),
    })
}

fn waiting(shape: &WaitingShape) -> Value {
    let process = shape.process.as_ref().map(|process| {
        json!({
            "image_kind": process.image_kind,
            "resource_type": process.resource_type,
            "capabilities": process.capabilities,
        })
    });
    json!({
        "team": shape.team,
        "platform": shape.platform,
        "tags": shape.tags,
        "process": process,
        "requests": shape.requests.as_ref().map(requests),
        "only_its_own_workers": shape.team_workers() == TeamWorkers::Own,
        "count": shape.count,
        "count_unplaceable": shape.count_unplaceable,
        "oldest_since": shape.oldest_since.as_ref().map(labels::instant),
        "waits_for": shape.waits_for,
        "never_for": shape.never_for,
    })
}

fn supply(shape: &WorkerShape) -> Value {
    json!({
        "platform": shape.platform,
        "tags": shape.tags,
        "team": shape.team,
        "image_kinds": shape.image_kinds,
        "capabilities": shape.capabilities,
        "workers": shape.workers,
        "workers_in_service": shape.workers_in_service,
        "workers_idle": shape.workers_idle,
        "slots_in_use": shape.slots_in_use,
        "slots_free": shape.slots_free,
        "workers_without_limit": shape.workers_without_limit,
    })
}

fn removable(worker: &RemovableWorker) -> Value {
    let would_lose = match worker.would_lose() {
        WouldLose::Unspecified => Value::Null,
        WouldLose::Nothing => json!(false),
        WouldLose::Something => json!(true),
    };
    json!({
        "worker_id": worker.worker_id,
        "worker_name": worker.worker_name,
        "leases": worker.leases,
        "kept_containers": worker.kept_containers,
        "kept_volumes": worker.kept_volumes,
        "idle_since": worker.idle_since.as_ref().map(labels::instant),
        "would_lose": would_lose,
        "reason": worker.reason,
    })
}

#[cfg(test)]
mod tests {
    use rpc::pb::scheduler::{ProcessRequirements, ResourceRequests};

    use super::*;

    #[test]
    fn text_has_demand_and_supply() {
        assert_eq!(
            text(&GetDemandResponse::default()),
            "no workload or lease waits for a worker\n\nno worker is in contact\n"
        );
        let response = GetDemandResponse {
            waiting: 5,
            waiting_unplaceable: 2,
            demand: vec![WaitingShape {
                team: "main".to_owned(),
                platform: "linux".to_owned(),
                tags: vec!["gpu".to_owned()],
                process: Some(ProcessRequirements { image_kind: "host".to_owned(), ..Default::default() }),
                requests: Some(ResourceRequests { memory_bytes: 1 << 30, ..Default::default() }),
                count: 2,
                count_unplaceable: 2,
                waits_for: "NEVER".to_owned(),
                never_for: vec!["one: lacks the tag gpu".to_owned()],
                ..Default::default()
            }],
            supply: vec![WorkerShape {
                platform: "linux".to_owned(),
                workers: 3,
                workers_in_service: 2,
                slots_in_use: 4,
                ..Default::default()
            }],
            refused: vec![WaitingShape {
                team: "main".to_owned(),
                platform: "darwin".to_owned(),
                count: 3,
                waits_for: "NEVER".to_owned(),
                never_for: vec!["all 3 workers: have the platform linux".to_owned()],
                ..Default::default()
            }],
            removable: vec![RemovableWorker {
                worker_name: "one".to_owned(),
                reason: "idle".to_owned(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let printed = text(&response);
        let expected = "5 waiting for a worker, the oldest for ; no existing worker can take 2 of them\n\n\
            COUNT  TEAM  PLATFORM  TAGS  IMAGE  RESERVES  WAITS FOR  NEVER\n\
            2      main  linux     gpu   host   1.0 GiB   NEVER      2\n  one: lacks the tag gpu\n\n\
            Refused in the last 10 minutes because no worker could ever take it\n\
            COUNT  TEAM  PLATFORM  WAITS FOR\n\
            3      main  darwin    NEVER\n  all 3 workers: have the platform linux\n\n\
            WORKERS  IN SERVICE  IDLE  USED SLOTS  FREE  PLATFORM\n\
            3        2           0     4           0     linux\n\n\
            Workers to remove, the one with the least harm first\n\
            WORKER  REASON\none     idle\n";
        assert_eq!(printed, expected);
        assert_eq!(document(&response)["removable"][0]["would_lose"], Value::Null);
    }
}
