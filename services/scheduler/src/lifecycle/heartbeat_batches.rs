//! Batched writes of heartbeats.
//!
//! Each message of a gateway counts as contact of its worker. Lost leases and takeovers depend on
//! the last contact, so a heartbeat is written before it is answered. One task of each replica
//! writes all heartbeats of [`MAX_DELAY`] in one transaction ([`workers::record_heartbeats`]). The
//! transaction touches no row that placement needs, unless a worker returns.

use std::time::Duration;

use domain::Timestamp;
use domain::worker::SessionClaims;
use sea_orm::DbErr;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use crate::context::Context;
use crate::db::entity::worker::State;
use crate::notify::changes::Effects;
use crate::notify::request::call;
use crate::workers::{self, Heartbeat, SessionError, Usage};

/// Longest time for which a batch collects heartbeats that are not urgent.
const MAX_DELAY: Duration = Duration::from_millis(20);

/// Maximum number of heartbeats in one transaction.
const BATCH: usize = 1000;

/// Maximum number of heartbeats that may wait. Further streams wait for room.
const CHANNEL_CAPACITY: usize = 4096;

/// Whether a message depends on the heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// The batch is written immediately.
    Now,
    /// The heartbeat may wait for others.
    Soon,
}

/// A heartbeat that waits for its write.
#[derive(Debug)]
struct PendingHeartbeat {
    session: SessionClaims,
    kept: Usage,
    urgency: Urgency,
    answer: oneshot::Sender<Result<Timestamp, SessionError>>,
}

/// The sender of heartbeats to the writing task. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Heartbeats(mpsc::Sender<PendingHeartbeat>);

/// The receiver of heartbeats, for [`write_forever`].
#[derive(Debug)]
pub(crate) struct HeartbeatReceiver(mpsc::Receiver<PendingHeartbeat>);

/// Creates the channel of the writing task.
pub(crate) fn channel() -> (Heartbeats, HeartbeatReceiver) {
    let (sender, receiver) = mpsc::channel(CHANNEL_CAPACITY);
    (Heartbeats(sender), HeartbeatReceiver(receiver))
}

impl Heartbeats {
    /// Records a heartbeat of `session`. Returns its time once the write is durable, or `None` if
    /// the service stops.
    pub(crate) async fn record(
        &self,
        session: &SessionClaims,
        kept: Usage,
        urgency: Urgency,
    ) -> Option<Result<Timestamp, SessionError>> {
        call(&self.0, |answer| PendingHeartbeat { session: session.clone(), kept, urgency, answer }).await
    }
}

impl HeartbeatReceiver {
    /// Collects the next batch. Returns an empty batch when all senders are dropped.
    async fn next(&mut self) -> Vec<PendingHeartbeat> {
        let mut batch = Vec::new();
        self.0.recv_many(&mut batch, BATCH).await;
        let until = Instant::now() + MAX_DELAY;
        let mut seen = 0;
        while !batch.is_empty() && batch.len() < BATCH {
            if batch[seen..].iter().any(|contact| contact.urgency == Urgency::Now) {
                break;
            }
            seen = batch.len();
            tokio::select! {
                count = self.0.recv_many(&mut batch, BATCH - seen) => if count == 0 { break },
                () = sleep_until(until) => break,
            }
        }
        batch
    }
}

/// Writes heartbeats until the service stops.
pub(crate) async fn write_forever(context: Context, mut heartbeats: HeartbeatReceiver) {
    let note = async {
        loop {
            let batch = heartbeats.next().await;
            if batch.is_empty() {
                return;
            }
            note(&context, batch).await;
        }
    };
    tokio::select! {
        () = context.stopping.cancelled() => {}
        () = note => {}
    }
}

async fn note(context: &Context, batch: Vec<PendingHeartbeat>) {
    let now = Timestamp::now();
    let heartbeats: Vec<_> = batch
        .iter()
        .zip(0..)
        // Each heartbeat gets a distinct time, so that the later one of two streams of a session is
        // known.
        .map(|(contact, micros)| Heartbeat {
            session: contact.session.clone(),
            kept: contact.kept,
            at: now + Duration::from_micros(micros),
        })
        .collect();
    let results = match write(context, &heartbeats).await {
        Ok(results) => results,
        Err(error) => {
            let failed = |contact: PendingHeartbeat| contact.answer.send(Err(error.clone().into()));
            return batch.into_iter().for_each(|contact| _ = failed(contact));
        }
    };
    for ((contact, heartbeat), results) in batch.into_iter().zip(&heartbeats).zip(results) {
        // A stream that has ended needs no answer.
        _ = contact.answer.send(results.map(|_| heartbeat.at));
    }
}

async fn write(
    context: &Context,
    heartbeats: &[Heartbeat],
) -> Result<Vec<Result<State, SessionError>>, DbErr> {
    let mut results =
        context.db.write(async |txn| workers::record_heartbeats(&txn, heartbeats).await).await?;
    let back: Vec<_> = heartbeats
        .iter()
        .zip(&results)
        .filter(|(_, results)| matches!(results, Ok(state) if *state != State::Running))
        .map(|(heartbeat, _)| heartbeat.session.clone())
        .collect();
    if !back.is_empty() {
        // A separate transaction, because a registration locks the row of its worker before its
        // heartbeat.
        let reconnect = context.change(async |txn| {
            let mut effects = Effects::default();
            workers::mark_running(&txn, &back, &mut effects).await?;
            Ok::<_, DbErr>(((), effects))
        });
        if let Err(error) = reconnect.await {
            // The other heartbeats are recorded nevertheless.
            for results in
                results.iter_mut().filter(|results| matches!(results, Ok(state) if *state != State::Running))
            {
                *results = Err(error.clone().into());
            }
        }
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use db::Database;
    use domain::worker::Marker;
    use domain::{GatewayInstance, MarkerId, WorkerId};
    use sea_orm::{ConnectionTrait, DatabaseTransaction, EntityTrait, Statement, TransactionTrait};
    use testing::databases::TestDatabase;

    use super::*;
    use crate::config::Config;
    use crate::db::entity::{heartbeat, worker};
    use crate::workers::Registration;
    use crate::workers::test_support::registration;

    async fn open(database: &TestDatabase) -> Database {
        Database::connect::<crate::Schema>(&database.url).await.expect("a database")
    }

    async fn register(
        txn: &DatabaseTransaction,
        registration: &Registration,
    ) -> Result<SessionClaims, SessionError> {
        let config = Config::new("", "");
        let registered =
            workers::register(txn, &[registration], &config, Timestamp::now(), &mut Effects::default()).await;
        registered?.remove(0)
    }

    async fn contacts(db: &Database) -> HashMap<WorkerId, heartbeat::Model> {
        let rows = heartbeat::Entity::find().all(db.read()).await.expect("contacts");
        rows.into_iter().map(|row| (WorkerId::from_uuid(row.worker_id), row)).collect()
    }

    fn heartbeat_of(session: &SessionClaims, volumes: u64, at: Timestamp) -> Heartbeat {
        Heartbeat { session: session.clone(), kept: Usage { volumes, ..Usage::default() }, at }
    }

    /// Returns for each heartbeat whether it was accepted.
    async fn observe(db: &Database, all: &[Heartbeat]) -> Vec<Result<State, String>> {
        let results =
            db.write(async |txn| workers::record_heartbeats(&txn, all).await).await.expect("results");
        results.into_iter().map(|results| results.map_err(|refused| format!("{refused:?}"))).collect()
    }

    async fn heartbeat_counts_only_for_its_session(database: TestDatabase) {
        let db = open(&database).await;
        let [one, two, gone] = ["one", "two", "gone"].map(registration);
        let reborn =
            Registration { marker: Marker { id: MarkerId::new(), boot: String::new() }, ..two.clone() };
        let mut sessions = Vec::new();
        for registration in [&one, &two, &reborn, &gone] {
            sessions
                .push(db.write(async |txn| register(&txn, registration).await).await.expect("registered"));
        }
        let [one, old, new, gone] = <[SessionClaims; 4]>::try_from(sessions).expect("four");
        assert_eq!(old.worker, new.worker);
        let removed = worker::Entity::delete_by_id(gone.worker.uuid());
        db.write(async |txn| removed.clone().exec(&*txn).await).await.expect("removed");

        let at = |seconds| Timestamp::now() + Duration::from_secs(seconds);
        let (first, last) = (at(100), at(101));
        let before = worker::Entity::find().all(db.read()).await.expect("workers");
        let all = [
            heartbeat_of(&one, 1, first),
            heartbeat_of(&old, 2, last),
            heartbeat_of(&new, 3, first),
            heartbeat_of(&gone, 4, first),
            // Another stream of the same session.
            heartbeat_of(&one, 5, last),
        ];
        let running = Ok(State::Running);
        let (stale, forgotten) = (Err("Stale".to_owned()), Err("Forgotten".to_owned()));
        let results = observe(&db, &all).await;
        assert_eq!(results, [running.clone(), stale.clone(), running.clone(), forgotten, running]);
        let noted = contacts(&db).await;
        let noted = |session: &SessionClaims| {
            noted.get(&session.worker).map(|contact| (contact.volumes, contact.last_contact_at))
        };
        assert_eq!((noted(&one), noted(&new), noted(&gone)), (Some((5, last.0)), Some((3, first.0)), None));
        assert_eq!(worker::Entity::find().all(db.read()).await.expect("workers"), before);

        // An old session changes nothing, regardless of the order.
        assert_eq!(observe(&db, &[heartbeat_of(&old, 9, at(200))]).await, [stale]);
        assert_eq!(contacts(&db).await[&new.worker].volumes, 3);

        let silent = "UPDATE workers SET state = 'lost'";
        db.read().execute_unprepared(silent).await.expect("written");
        assert_eq!(observe(&db, &[heartbeat_of(&one, 5, last)]).await, [Ok(State::Lost)]);
        let back = [one.clone(), old];
        let mut effects = db
            .write(async |txn| {
                let mut effects = Effects::default();
                workers::mark_running(&txn, &back, &mut effects).await?;
                Ok::<_, DbErr>(effects)
            })
            .await
            .expect("back");
        effects.workers.dedup();
        assert_eq!((effects.workers, effects.registry), (vec![one.worker], true));
        assert_eq!(observe(&db, &[heartbeat_of(&one, 5, last)]).await, [Ok(State::Running)]);
        assert_eq!(observe(&db, &[heartbeat_of(&new, 5, last)]).await, [Ok(State::Lost)]);
    }

    #[tokio::test]
    async fn heartbeat_counts_only_for_its_session_sqlite() {
        heartbeat_counts_only_for_its_session(testing::databases::sqlite()).await;
    }

    #[tokio::test]
    async fn heartbeat_counts_only_for_its_session_postgres() {
        heartbeat_counts_only_for_its_session(testing::databases::postgres().await).await;
    }

    #[tokio::test]
    async fn heartbeats_are_one_statement_without_worker_locks() {
        let database = testing::databases::postgres().await;
        let db = open(&database).await;
        let mut all = Vec::new();
        for number in 0..100 {
            let registration = registration(&format!("worker-{number}"));
            let session =
                db.write(async |txn| register(&txn, &registration).await).await.expect("registered");
            all.push(heartbeat_of(&session, number, Timestamp::now()));
        }
        let count = "CREATE TABLE statements (on_table TEXT);
             CREATE FUNCTION count_statement() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN INSERT INTO statements VALUES (TG_TABLE_NAME); RETURN NULL; END $$;
             CREATE TRIGGER counted AFTER INSERT OR UPDATE OR DELETE ON workers FOR EACH STATEMENT EXECUTE FUNCTION count_statement();
             CREATE TRIGGER counted AFTER INSERT OR UPDATE OR DELETE ON heartbeats FOR EACH STATEMENT EXECUTE FUNCTION count_statement()";
        db.read().execute_unprepared(count).await.expect("triggers installed");
        // A row lock changes `xmax`, so it shows here like a write.
        let versions =
            "SELECT CAST(xmin AS TEXT) || ' ' || CAST(xmax AS TEXT) AS version FROM workers ORDER BY id";
        let versions = async || {
            let query = Statement::from_string(db.read().get_database_backend(), versions);
            let rows = db.read().query_all_raw(query).await.expect("rows");
            let versions = rows.iter().map(|row| row.try_get::<String>("", "version").expect("a text"));
            versions.collect::<Vec<_>>()
        };
        let before = versions().await;
        assert!(observe(&db, &all).await.iter().all(|results| *results == Ok(State::Running)));
        assert_eq!(versions().await, before);
        let query = "SELECT on_table FROM statements";
        let query = Statement::from_string(db.read().get_database_backend(), query);
        let counted = db.read().query_all_raw(query).await.expect("rows");
        let counted: Vec<String> =
            counted.iter().map(|row| row.try_get("", "on_table").expect("a text")).collect();
        assert_eq!(counted, ["heartbeats"]);
        let noted = contacts(&db).await;
        assert!(
            all.iter()
                .all(|heartbeat| noted[&heartbeat.session.worker].volumes == heartbeat.kept.volumes as i64)
        );
    }

    /// Waits until some transaction waits for a lock.
    async fn lock_is_awaited(db: &Database) {
        let query =
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        loop {
            let query = Statement::from_string(db.read().get_database_backend(), query);
            if db.read().query_one_raw(query).await.expect("locks").is_some() {
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn takeover_and_heartbeat_exclude_each_other() {
        let database = testing::databases::postgres().await;
        let db = open(&database).await;
        let first = registration("one");
        let session = db.write(async |txn| register(&txn, &first).await).await.expect("registered");
        let silent = "UPDATE heartbeats SET last_contact_at = 1";
        db.read().execute_unprepared(silent).await.expect("written");
        let standby = Registration { instance: GatewayInstance::new(), ..first };

        // The heartbeat is first: the takeover waits, and sees the heartbeat.
        let observing = db.read().begin().await.expect("a transaction");
        let results =
            workers::record_heartbeats(&observing, &[heartbeat_of(&session, 1, Timestamp::now())]).await;
        assert!(matches!(results.as_deref(), Ok([Ok(_)])), "{results:?}");
        let taking_over = db.write(async |txn| register(&txn, &standby).await);
        let heard_meanwhile = async {
            lock_is_awaited(&db).await;
            observing.commit().await.expect("committed");
        };
        let (taken_over, ()) = tokio::join!(taking_over, heard_meanwhile);
        assert!(matches!(taken_over, Err(SessionError::AlreadyAttended)), "{taken_over:?}");

        // The takeover is first: the heartbeat waits, and is rejected.
        db.read().execute_unprepared(silent).await.expect("written");
        let taking_over = db.read().begin().await.expect("a transaction");
        let next = register(&taking_over, &standby).await.expect("a takeover of a silent worker");
        let late = [heartbeat_of(&session, 2, Timestamp::now())];
        let observing = observe(&db, &late);
        let taken_over_meanwhile = async {
            lock_is_awaited(&db).await;
            taking_over.commit().await.expect("committed");
        };
        let (results, ()) = tokio::join!(observing, taken_over_meanwhile);
        assert_eq!(results, [Err("Stale".to_owned())]);
        assert_eq!(observe(&db, &[heartbeat_of(&next, 3, Timestamp::now())]).await, [Ok(State::Running)]);
    }

    #[tokio::test]
    async fn urgent_heartbeat_flushes_the_batch() {
        let (contacts, mut heartbeats) = channel();
        let session = |number| SessionClaims {
            worker: WorkerId::new(),
            incarnation: domain::worker::Incarnation(number),
            session: domain::worker::Session(number),
            instance: GatewayInstance::new(),
        };
        let sessions = [1, 2, 3].map(session);
        let record = |number: usize, urgency| contacts.record(&sessions[number], Usage::default(), urgency);
        let answering = async {
            let batch = heartbeats.next().await;
            let numbers: Vec<_> = batch.iter().map(|contact| contact.session.session.0).collect();
            for contact in batch {
                let answer =
                    if contact.session.session.0 == 2 { Err(SessionError::Stale) } else { Ok(Timestamp(7)) };
                contact.answer.send(answer).expect("it waits");
            }
            numbers
        };
        let (one, two, three, numbers) = tokio::join!(
            record(0, Urgency::Soon),
            record(1, Urgency::Soon),
            record(2, Urgency::Now),
            answering
        );
        assert_eq!(numbers, [1, 2, 3]);
        assert!(matches!((one, three), (Some(Ok(Timestamp(7))), Some(Ok(Timestamp(7))))));
        assert!(matches!(two, Some(Err(SessionError::Stale))), "only its own stream fails");
        drop(heartbeats);
        assert!(record(0, Urgency::Now).await.is_none(), "the service stops");
    }
}
