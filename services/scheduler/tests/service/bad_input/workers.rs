//! RPCs of the service `Workers` except `Synchronize`.

use domain::VolumeHandle;
use prost_reflect::Value;
use rpc::Reason::*;
use rpc::pb::scheduler as pb;
use testing::bad_input::wrong::*;
use testing::bad_input::{Bad, Call, Expected};

use super::workloads::page;
use super::world::World;
use super::wrong::{worker, worker_id};
use super::{OTHER, TEAM};

/// RPCs that change nothing if the request is valid.
pub(super) async fn read_calls(world: &World<'_>) -> Vec<Call> {
    let one = world.one.welcome.worker_id.clone();
    let ticket = pb::IssueTicketRequest {
        team: TEAM.to_owned(),
        worker_id: one.clone(),
        volume_handle: world.replica.clone(),
        operation: pb::TicketOperation::Read.into(),
    };
    let watch = pb::WatchWorkersRequest { after_revision: 0 };
    let compacted = |value| {
        let expected = Expected::Refused(Compacted, String::new());
        change("after_revision", "that was never reached", Value::U64(value), expected)
    };
    let list = pb::ListWorkersRequest { page_size: 1, ..Default::default() };
    let own = world.scheduler.workers().list_workers(list.clone()).await.expect("a page").into_inner();
    let workloads = pb::ListRequest { page_size: 1, ..pb::ListRequest::default() };
    let of_workloads = world.scheduler.workloads().list(workloads).await.expect("a page").into_inner();
    vec![
        Call::new("Workers.Keys", [pb::KeysRequest {}], []),
        Call::new(
            "Workers.IssueTicket",
            [ticket],
            [
                team("team"),
                but("team", "that does not have it", OTHER, TransferNotPlanned),
                worker_id("worker_id", world),
                but("worker_id", "that is out of contact", &world.away.worker_id, WorkerUnreachable),
                id("volume_handle"),
                but("volume_handle", "unknown", VolumeHandle::new(), TransferNotPlanned),
                choice("operation"),
            ],
        ),
        Call::new(
            "Workers.IssueProxyTicket",
            [pb::IssueProxyTicketRequest { worker_id: one.clone() }],
            [worker_id("worker_id", world)],
        ),
        Call::new(
            "Workers.ListWorkers",
            [pb::ListWorkersRequest { page_token: own.next_page_token, ..list }],
            [page(&[&of_workloads.next_page_token])],
        ),
        Call::new("Workers.GetWorker", [pb::GetWorkerRequest { worker: one }], [worker("worker", world)]),
        Call::new(
            "Workers.WatchWorkers",
            [watch],
            [compacted(1 << 62), compacted(i64::MAX.unsigned_abs()), compacted(u64::MAX)],
        ),
    ]
}

/// RPCs that remove workers.
pub(super) fn ends(world: &World<'_>) -> Vec<Call> {
    let (three, hour) = ("three".to_owned(), Some(rpc::duration(std::time::Duration::from_secs(3600))));
    let land = pb::CordonWorkerRequest { worker: three.clone(), interrupt_after: hour };
    let retire = pb::RetireWorkerRequest { worker: three.clone(), interrupt_after: hour, force: false };
    let prune = pb::PruneWorkerRequest { worker: "doomed".to_owned(), force: false };
    let later = || {
        let mut bad = negative("interrupt_after");
        bad.push(time("interrupt_after", i64::MAX, 999_999_999, Expected::Taken));
        bad
    };
    let kept = || {
        let mut bad = but("worker", "with the last replica of something", "away", LastReplica);
        bad.extend(but("worker", "with an orphan", "aside", HoldsOrphans));
        bad
    };
    vec![
        Call::new("Workers.CordonWorker", [land], [worker("worker", world), later()]),
        Call::new(
            "Workers.RetireWorker",
            [retire],
            [
                went("worker", world),
                kept(),
                but("worker", "in contact, with the last replica of something", "one", LastReplica),
                later(),
                taken("force", "although nothing is lost", Value::Bool(true)),
            ],
        ),
        Call::new(
            "Workers.UncordonWorker",
            [pb::UncordonWorkerRequest { worker: three }],
            [worker("worker", world)],
        ),
        Call::new(
            "Workers.PruneWorker",
            [prune],
            [
                went("worker", world),
                kept(),
                but("worker", "that is in contact", "one", WorkerInContact),
                given(
                    |sent| put(sent, "worker", Some(&text("one"))),
                    [change(
                        "force",
                        "of a worker that is in contact",
                        Value::Bool(true),
                        Expected::Refused(WorkerInContact, String::new()),
                    )],
                ),
            ],
        ),
    ]
}

/// Name or id of a worker. The RPC succeeds if the worker has already been removed.
fn went(field: &str, world: &World<'_>) -> Vec<Bad> {
    let mut bad = named(field, 255);
    bad.extend(but(field, "unknown", "unknown", WorkerNotFound));
    bad.extend(nothing(field, "that was pruned", text(&world.pruned)));
    bad.extend(nothing(field, "that was retired", text("retired")));
    bad
}
