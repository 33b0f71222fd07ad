//! The state of the database, converted to the model.

use std::collections::BTreeMap;

use domain::worker::Labels;
use domain::{GatewayInstance, LeaseId, MarkerId, Timestamp, WorkerId, WorkloadId};
use sea_orm::{EntityTrait, QueryOrder};

use super::fixtures::{self, Amounts};
use super::state::{Ending, Lease, Minutes, Parcel, RemovedWorker, State, Worker, Workload};
use crate::db::entity::worker::Desired;
use crate::db::entity::{
    event, from_json, heartbeat, lease, outbox, owner_affinity, removed_worker, worker, workload,
};
use crate::outbox::Message;
use crate::outcome;
use crate::placement::FailedWorker;
use crate::workloads::events::Event;

/// Conversion of database times to minutes of the run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Calendar {
    pub(super) began: Timestamp,
    pub(super) moved: Minutes,
}

impl Calendar {
    /// Rounds to five minutes. Deadlines fall on odd multiples of five.
    fn minutes(self, at: i64) -> Minutes {
        let minutes = (at - self.began.0) as f64 / 60e6;
        (minutes / 5.0).round() as Minutes * 5 + self.moved
    }
}

fn number(value: i64) -> u64 {
    u64::try_from(value).expect("a non-negative number")
}

fn kind(event: &Event) -> &'static str {
    match event {
        Event::Queued { .. } => "queued",
        Event::Placed { .. } => "placed",
        Event::Preparing => "preparing",
        Event::Materializing { .. } => "materializing",
        Event::Running { .. } => "running",
        Event::Publishing => "publishing",
        Event::Finished { .. } => "finished",
    }
}

/// Reads the state of the database.
pub(super) async fn read_state(db: &db::Database, calendar: Calendar) -> State {
    let db = db.read();
    let took = Timestamp::now().since(calendar.began);
    assert!(took < 2 * super::MINUTE, "the run takes too long to predict deadlines: {took:?}");
    let minutes = |at: i64| calendar.minutes(at);
    let contacts: BTreeMap<_, _> = heartbeat::Entity::find()
        .all(db)
        .await
        .expect("contacts")
        .into_iter()
        .map(|contact| (contact.worker_id, contact))
        .collect();
    let mut state = State::default();
    let mut taken = BTreeMap::new();
    for row in worker::Entity::find().all(db).await.expect("workers") {
        let contact = &contacts[&row.id];
        let labels: Labels = from_json(&row.labels).expect("labels");
        assert_eq!(labels.platform, fixtures::traits(&row.name).platform, "the name belongs to one worker");
        let worker = Worker {
            id: WorkerId::from_uuid(row.id),
            instance: GatewayInstance::from_uuid(row.gateway_instance),
            marker: MarkerId::from_uuid(row.marker_id),
            team: labels.team,
            incarnation: number(row.incarnation),
            session: number(row.session),
            desired: row.desired,
            contact: row.state,
            misfit: row.unsupported_versions != "[]",
            attended: contact.attended,
            heard_at: minutes(contact.last_contact_at),
            patient_since: minutes(contact.patient_since),
            interrupt_at: row.interrupt_at.map(minutes),
            landed: row.landed_at.is_some(),
            forced: row.force_retire,
            leaving: row.leaving.is_some(),
            failures: row.failures,
            quarantines: row.quarantines,
            quarantined_until: row.quarantined_until.map(minutes),
            failed_team: row.failed_team.clone(),
        };
        let counted = Amounts {
            cpu_millis: number(row.reserved_cpu_millis),
            memory_bytes: number(row.reserved_memory_bytes),
            disk_bytes: number(row.reserved_disk_bytes),
        };
        taken.insert(row.name.clone(), (number(row.active_tasks), counted));
        assert!(
            row.landed_at.is_none() || row.desired != Desired::Run,
            "the worker takes work and is drained"
        );
        state.generations.insert(worker.id, number(row.generation));
        state.workers.insert(row.name, worker);
    }
    let removed = removed_worker::Entity::find().order_by_asc(removed_worker::Column::Revision);
    for (order, row) in removed.all(db).await.expect("workers").into_iter().enumerate() {
        let removed = RemovedWorker {
            name: row.name,
            how: row.how,
            marker: row.marker_id.map(MarkerId::from_uuid),
            at: minutes(row.removed_at),
            order,
        };
        state.removed_workers.insert(WorkerId::from_uuid(row.id), removed);
    }
    for row in lease::Entity::find().all(db).await.expect("leases") {
        let lease = Lease {
            worker: WorkerId::from_uuid(row.worker_id),
            incarnation: number(row.incarnation),
            kind: row.kind,
            team: row.team,
            amounts: Amounts {
                cpu_millis: number(row.cpu_millis),
                memory_bytes: number(row.memory_bytes),
                disk_bytes: number(row.disk_bytes),
            },
            workload: row.workload_id.map(WorkloadId::from_uuid),
            owner: row.owner,
            state: row.state,
            phase: row.phase,
            stop: row.stop_reason,
            grace: row.stop_grace_us.map(|micros| micros / 1_000_000),
            ended_by: row.ended_by,
            granted_at: minutes(row.granted_at),
            expires_at: row.expires_at.map(minutes),
            ended_at: row.ended_at.map(minutes),
            in_use: row.in_use,
            settles: row.settles,
        };
        state.lease_generations.insert(LeaseId::from_uuid(row.id), number(row.generation));
        state.near.insert(LeaseId::from_uuid(row.id), row.request.parse().ok());
        state.leases.insert(LeaseId::from_uuid(row.id), lease);
    }
    for (name, counted) in taken {
        let live = state.live(state.workers[&name].id).map(|(_, lease)| lease);
        let slots: Vec<_> = live.filter(|lease| lease.kind.takes_a_slot()).collect();
        let amounts = slots.iter().fold(Amounts::default(), |all, lease| all.and(lease.amounts));
        assert_eq!(counted, (slots.len() as u64, amounts), "the counters of {name} match its leases");
        let traits = fixtures::traits(&name);
        assert!(traits.max_tasks.is_none_or(|max| slots.len() <= max as usize), "{name} has {slots:?}");
        assert!(amounts.fit(traits.has), "{name} has {amounts:?} reserved");
    }
    for row in workload::Entity::find().all(db).await.expect("workloads") {
        let failed_on: Vec<FailedWorker> = from_json(&row.failed_on).expect("failures");
        let ending = row.ending.as_deref().map(|ending| {
            let ending: outcome::Ending = from_json(ending).expect("an ending");
            Ending {
                outcome: ending.outcome,
                reason: ending.failure.map(|failure| failure.reason),
                has_outputs: !ending.outputs.is_empty(),
            }
        });
        let finished = ending.as_ref().filter(|_| row.state == workload::State::Finished);
        let listed_as = finished.map(|ending| workload::Outcome::from(ending.outcome));
        assert_eq!(row.outcome, listed_as, "{} has the outcome of its ending", row.id);
        let workload = Workload {
            state: row.state,
            lease: row.lease_id.map(LeaseId::from_uuid),
            started: row.started_at.is_some(),
            retried: row.retried,
            failed_on: failed_on.into_iter().map(|failed| (failed.worker, failed.failure.reason)).collect(),
            queue_deadline: row.queue_deadline.map(minutes),
            run_deadline: row.run_deadline.map(minutes),
            finished_at: row.finished_at.map(minutes),
            ending,
            events: vec![],
        };
        state.workloads.insert(WorkloadId::from_uuid(row.id), workload);
    }
    let events =
        event::Entity::find().order_by_asc(event::Column::WorkloadId).order_by_asc(event::Column::Revision);
    let mut revisions = BTreeMap::<WorkloadId, i64>::new();
    for row in events.all(db).await.expect("events") {
        let id = WorkloadId::from_uuid(row.workload_id);
        let last = revisions.entry(id).or_default();
        *last += 1;
        assert_eq!(row.revision, *last, "{id} misses a revision");
        let events = &mut state.workloads.get_mut(&id).expect("its workload").events;
        let kind = kind(&from_json(&row.event).expect("an event"));
        if kind != "queued" || events.last() != Some(&kind) {
            events.push(kind);
        }
    }
    for row in owner_affinity::Entity::find().all(db).await.expect("owners") {
        let worker = (WorkerId::from_uuid(row.worker_id), minutes(row.granted_at));
        state.owners.insert((row.team, row.owner), worker);
    }
    for row in outbox::Entity::find().all(db).await.expect("parcels") {
        let parcel = match from_json(&row.message).expect("a message") {
            Message::Settle(_) => Parcel::Settle,
            Message::EndAttempt { .. } => Parcel::EndAttempt,
        };
        state.add_parcel(row.holder_id, parcel);
    }
    state
}
