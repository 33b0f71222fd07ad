//! Heartbeats: that gateways were heard is written down, of many at a time.
//!
//! Each message of a gateway counts as contact of its worker, and whoever loses its lease, or may attend it, depends on that; so it is written
//! before it is answered. One task of each replica writes all that came within [`TOGETHER`] in one transaction ([`workers::observe`]). It
//! touches no row that placing needs, unless a worker comes back.

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

/// How long is waited for others when nobody hurries.
const TOGETHER: Duration = Duration::from_millis(20);

/// How many are written at a time.
const BATCH: usize = 1000;

/// How many may wait. Further streams wait until there is room.
const WAITING: usize = 4096;

/// Whether somebody waits for what depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// It is written at once, with all that is there.
    Now,
    /// It may wait for others.
    Soon,
}

/// A gateway that was heard.
#[derive(Debug)]
struct PendingHeartbeat {
    session: SessionClaims,
    kept: Usage,
    urgency: Urgency,
    answer: oneshot::Sender<Result<Timestamp, SessionError>>,
}

/// Where it is said who was heard. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Heartbeats(mpsc::Sender<PendingHeartbeat>);

/// What was said, for [`write_forever`].
#[derive(Debug)]
pub(crate) struct HeartbeatReceiver(mpsc::Receiver<PendingHeartbeat>);

/// A way to say who was heard, and its end.
pub(crate) fn channel() -> (Heartbeats, HeartbeatReceiver) {
    let (sender, receiver) = mpsc::channel(WAITING);
    (Heartbeats(sender), HeartbeatReceiver(receiver))
}

impl Heartbeats {
    /// The gateway of `session` was heard. Answers as of when, once that is durable. `None`: the service stops.
    pub(crate) async fn heard(
        &self,
        session: &SessionClaims,
        kept: Usage,
        urgency: Urgency,
    ) -> Option<Result<Timestamp, SessionError>> {
        call(&self.0, |answer| PendingHeartbeat { session: session.clone(), kept, urgency, answer }).await
    }
}

impl HeartbeatReceiver {
    /// All that is said together. Empty: nobody says anything any more.
    async fn next(&mut self) -> Vec<PendingHeartbeat> {
        let mut batch = Vec::new();
        self.0.recv_many(&mut batch, BATCH).await;
        let until = Instant::now() + TOGETHER;
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

/// Writes down who was heard, until the service stops.
pub(crate) async fn write_forever(context: Context, mut said: HeartbeatReceiver) {
    let note = async {
        loop {
            let batch = said.next().await;
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
    let heard: Vec<_> = batch
        .iter()
        .zip(0..)
        // Each at a time of its own, so that of two streams of one session it can be told which was heard last.
        .map(|(contact, micros)| Heartbeat {
            session: contact.session.clone(),
            kept: contact.kept,
            at: now + Duration::from_micros(micros),
        })
        .collect();
    let judged = match write(context, &heard).await {
        Ok(judged) => judged,
        Err(error) => {
            let failed = |contact: PendingHeartbeat| contact.answer.send(Err(error.clone().into()));
            return batch.into_iter().for_each(|contact| _ = failed(contact));
        }
    };
    for ((contact, heard), judged) in batch.into_iter().zip(&heard).zip(judged) {
        // A stream that has ended needs no answer.
        _ = contact.answer.send(judged.map(|_| heard.at));
    }
}

async fn write(context: &Context, heard: &[Heartbeat]) -> Result<Vec<Result<State, SessionError>>, DbErr> {
    let mut judged = context.db.write(async |txn| workers::observe(&txn, heard).await).await?;
    let back: Vec<_> = heard
        .iter()
        .zip(&judged)
        .filter(|(_, judged)| matches!(judged, Ok(state) if *state != State::Running))
        .map(|(heard, _)| heard.session.clone())
        .collect();
    if !back.is_empty() {
        // Apart, for whoever says hello holds the row of its worker when it comes to that of its contact.
        let come_back = context.change(async |txn| {
            let mut effects = Effects::default();
            workers::come_back(&txn, &back, &mut effects).await?;
            Ok::<_, DbErr>(((), effects))
        });
        if let Err(error) = come_back.await {
            // The others were heard all the same.
            for judged in
                judged.iter_mut().filter(|judged| matches!(judged, Ok(state) if *state != State::Running))
            {
                *judged = Err(error.clone().into());
            }
        }
    }
    Ok(judged)
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
    use crate::workers::test_support::hello;

    async fn open(database: &TestDatabase) -> Database {
        Database::connect::<crate::Schema>(&database.url).await.expect("a database")
    }

    async fn let_in(txn: &DatabaseTransaction, hello: &Registration) -> Result<SessionClaims, SessionError> {
        let config = Config::new("", "");
        let let_in =
            workers::register(txn, &[hello], &config, Timestamp::now(), &mut Effects::default()).await;
        let_in?.remove(0)
    }

    async fn contacts(db: &Database) -> HashMap<WorkerId, heartbeat::Model> {
        let rows = heartbeat::Entity::find().all(db.read()).await.expect("contacts");
        rows.into_iter().map(|row| (WorkerId::from_uuid(row.worker_id), row)).collect()
    }

    fn heard(session: &SessionClaims, volumes: u64, at: Timestamp) -> Heartbeat {
        Heartbeat { session: session.clone(), kept: Usage { volumes, ..Usage::default() }, at }
    }

    /// Of each: whether it counts.
    async fn observe(db: &Database, all: &[Heartbeat]) -> Vec<Result<State, String>> {
        let judged = db.write(async |txn| workers::observe(&txn, all).await).await.expect("judged");
        judged.into_iter().map(|judged| judged.map_err(|refused| format!("{refused:?}"))).collect()
    }

    async fn a_contact_counts_for_its_own_session_only(database: TestDatabase) {
        let db = open(&database).await;
        let [one, two, gone] = ["one", "two", "gone"].map(hello);
        let reborn =
            Registration { marker: Marker { id: MarkerId::new(), boot: String::new() }, ..two.clone() };
        let mut sessions = Vec::new();
        for hello in [&one, &two, &reborn, &gone] {
            sessions.push(db.write(async |txn| let_in(&txn, hello).await).await.expect("let in"));
        }
        let [one, old, new, gone] = <[SessionClaims; 4]>::try_from(sessions).expect("four");
        assert_eq!(old.worker, new.worker);
        let removed = worker::Entity::delete_by_id(gone.worker.uuid());
        db.write(async |txn| removed.clone().exec(&*txn).await).await.expect("removed");

        let at = |seconds| Timestamp::now() + Duration::from_secs(seconds);
        let (first, last) = (at(100), at(101));
        let before = worker::Entity::find().all(db.read()).await.expect("workers");
        let all = [
            heard(&one, 1, first),
            heard(&old, 2, last),
            heard(&new, 3, first),
            heard(&gone, 4, first),
            // Another stream of the same session.
            heard(&one, 5, last),
        ];
        let running = Ok(State::Running);
        let (stale, forgotten) = (Err("Stale".to_owned()), Err("Forgotten".to_owned()));
        let judged = observe(&db, &all).await;
        assert_eq!(judged, [running.clone(), stale.clone(), running.clone(), forgotten, running]);
        let noted = contacts(&db).await;
        let noted = |session: &SessionClaims| {
            noted.get(&session.worker).map(|contact| (contact.volumes, contact.last_contact_at))
        };
        assert_eq!((noted(&one), noted(&new), noted(&gone)), (Some((5, last.0)), Some((3, first.0)), None));
        assert_eq!(worker::Entity::find().all(db.read()).await.expect("workers"), before);

        // The old one alone changes nothing, whatever the order.
        assert_eq!(observe(&db, &[heard(&old, 9, at(200))]).await, [stale]);
        assert_eq!(contacts(&db).await[&new.worker].volumes, 3);

        let silent = "UPDATE workers SET state = 'lost'";
        db.read().execute_unprepared(silent).await.expect("written");
        assert_eq!(observe(&db, &[heard(&one, 5, last)]).await, [Ok(State::Lost)]);
        let back = [one.clone(), old];
        let mut effects = db
            .write(async |txn| {
                let mut effects = Effects::default();
                workers::come_back(&txn, &back, &mut effects).await?;
                Ok::<_, DbErr>(effects)
            })
            .await
            .expect("back");
        effects.workers.dedup();
        assert_eq!((effects.workers, effects.registry), (vec![one.worker], true));
        assert_eq!(observe(&db, &[heard(&one, 5, last)]).await, [Ok(State::Running)]);
        assert_eq!(observe(&db, &[heard(&new, 5, last)]).await, [Ok(State::Lost)]);
    }

    #[tokio::test]
    async fn a_contact_counts_for_its_own_session_only_sqlite() {
        a_contact_counts_for_its_own_session_only(testing::databases::sqlite()).await;
    }

    #[tokio::test]
    async fn a_contact_counts_for_its_own_session_only_postgres() {
        a_contact_counts_for_its_own_session_only(testing::databases::postgres().await).await;
    }

    #[tokio::test]
    async fn contacts_of_many_are_one_statement_and_touch_no_worker() {
        let database = testing::databases::postgres().await;
        let db = open(&database).await;
        let mut all = Vec::new();
        for number in 0..100 {
            let hello = hello(&format!("worker-{number}"));
            let session = db.write(async |txn| let_in(&txn, &hello).await).await.expect("let in");
            all.push(heard(&session, number, Timestamp::now()));
        }
        let count = "CREATE TABLE statements (on_table TEXT);
             CREATE FUNCTION count_statement() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN INSERT INTO statements VALUES (TG_TABLE_NAME); RETURN NULL; END $$;
             CREATE TRIGGER counted AFTER INSERT OR UPDATE OR DELETE ON workers FOR EACH STATEMENT EXECUTE FUNCTION count_statement();
             CREATE TRIGGER counted AFTER INSERT OR UPDATE OR DELETE ON heartbeats FOR EACH STATEMENT EXECUTE FUNCTION count_statement()";
        db.read().execute_unprepared(count).await.expect("they are counted");
        // A lock of a row stands there like a write.
        let versions =
            "SELECT CAST(xmin AS TEXT) || ' ' || CAST(xmax AS TEXT) AS version FROM workers ORDER BY id";
        let versions = async || {
            let asked = Statement::from_string(db.read().get_database_backend(), versions);
            let rows = db.read().query_all_raw(asked).await.expect("rows");
            let versions = rows.iter().map(|row| row.try_get::<String>("", "version").expect("a text"));
            versions.collect::<Vec<_>>()
        };
        let before = versions().await;
        assert!(observe(&db, &all).await.iter().all(|judged| *judged == Ok(State::Running)));
        assert_eq!(versions().await, before);
        let asked = "SELECT on_table FROM statements";
        let asked = Statement::from_string(db.read().get_database_backend(), asked);
        let counted = db.read().query_all_raw(asked).await.expect("rows");
        let counted: Vec<String> =
            counted.iter().map(|row| row.try_get("", "on_table").expect("a text")).collect();
        assert_eq!(counted, ["heartbeats"]);
        let noted = contacts(&db).await;
        assert!(all.iter().all(|heard| noted[&heard.session.worker].volumes == heard.kept.volumes as i64));
    }

    /// Waits until somebody waits for a lock.
    async fn somebody_waits(db: &Database) {
        let query =
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        loop {
            let asked = Statement::from_string(db.read().get_database_backend(), query);
            if db.read().query_one_raw(asked).await.expect("locks").is_some() {
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn nobody_takes_over_who_is_heard_in_this_moment() {
        let database = testing::databases::postgres().await;
        let db = open(&database).await;
        let first = hello("one");
        let session = db.write(async |txn| let_in(&txn, &first).await).await.expect("let in");
        let silent = "UPDATE heartbeats SET last_contact_at = 1";
        db.read().execute_unprepared(silent).await.expect("written");
        let standby = Registration { instance: GatewayInstance::new(), ..first };

        // Heard first: it waits, and sees that.
        let observing = db.read().begin().await.expect("a transaction");
        let judged = workers::observe(&observing, &[heard(&session, 1, Timestamp::now())]).await;
        assert!(matches!(judged.as_deref(), Ok([Ok(_)])), "{judged:?}");
        let taking_over = db.write(async |txn| let_in(&txn, &standby).await);
        let heard_meanwhile = async {
            somebody_waits(&db).await;
            observing.commit().await.expect("committed");
        };
        let (taken_over, ()) = tokio::join!(taking_over, heard_meanwhile);
        assert!(matches!(taken_over, Err(SessionError::AlreadyAttended)), "{taken_over:?}");

        // Taken over first: who is heard waits, and is refused.
        db.read().execute_unprepared(silent).await.expect("written");
        let taking_over = db.read().begin().await.expect("a transaction");
        let next = let_in(&taking_over, &standby).await.expect("it was silent");
        let late = [heard(&session, 2, Timestamp::now())];
        let observing = observe(&db, &late);
        let taken_over_meanwhile = async {
            somebody_waits(&db).await;
            taking_over.commit().await.expect("committed");
        };
        let (judged, ()) = tokio::join!(observing, taken_over_meanwhile);
        assert_eq!(judged, [Err("Stale".to_owned())]);
        assert_eq!(observe(&db, &[heard(&next, 3, Timestamp::now())]).await, [Ok(State::Running)]);
    }

    #[tokio::test]
    async fn who_hurries_takes_all_with_him_who_wait() {
        let (contacts, mut said) = channel();
        let session = |number| SessionClaims {
            worker: WorkerId::new(),
            incarnation: domain::worker::Incarnation(number),
            session: domain::worker::Session(number),
            instance: GatewayInstance::new(),
        };
        let sessions = [1, 2, 3].map(session);
        let saying = |number: usize, urgency| contacts.heard(&sessions[number], Usage::default(), urgency);
        let answering = async {
            let batch = said.next().await;
            let numbers: Vec<_> = batch.iter().map(|contact| contact.session.session.0).collect();
            for contact in batch {
                let answer =
                    if contact.session.session.0 == 2 { Err(SessionError::Stale) } else { Ok(Timestamp(7)) };
                contact.answer.send(answer).expect("it waits");
            }
            numbers
        };
        let (one, two, three, numbers) = tokio::join!(
            saying(0, Urgency::Soon),
            saying(1, Urgency::Soon),
            saying(2, Urgency::Now),
            answering
        );
        assert_eq!(numbers, [1, 2, 3]);
        assert!(matches!((one, three), (Some(Ok(Timestamp(7))), Some(Ok(Timestamp(7))))));
        assert!(matches!(two, Some(Err(SessionError::Stale))), "only its own stream");
        drop(said);
        assert!(saying(0, Urgency::Now).await.is_none(), "the service stops");
    }
}
