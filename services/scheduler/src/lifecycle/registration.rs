//! Registration of gateways in batches.
//!
//! Each registration changes the revision of workers, so registrations are serialized
//! ([`crate::workers::revisions::changed`]). One task of each replica registers all waiting
//! gateways in one transaction. All gateways can therefore return within the TTL after an outage of
//! the scheduler.

use std::collections::HashSet;

use db::Transaction;
use domain::Timestamp;
use domain::worker::SessionClaims;
use sea_orm::DbErr;
use tokio::sync::{mpsc, oneshot};

use crate::db::entity::is_duplicate;
use crate::lifecycle::Lifecycle;
use crate::notify::changes::Effects;
use crate::notify::request::call;
use crate::workers::{self, Registration, SessionError};

/// Maximum number of registrations in one transaction.
const BATCH: usize = 64;

/// Maximum number of registrations that may wait. Further streams wait for room.
const CHANNEL_CAPACITY: usize = 1024;

/// A session, and the time at which it was opened or continued.
type SessionResult = Result<(SessionClaims, Timestamp), SessionError>;

/// A registration that waits for its session.
#[derive(Debug)]
struct PendingRegistration {
    registration: Registration,
    answer: oneshot::Sender<SessionResult>,
}

/// The sender of registrations to the registering task. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Registrations(mpsc::Sender<PendingRegistration>);

/// The receiver of registrations, for [`register_forever`].
#[derive(Debug)]
pub(crate) struct RegistrationReceiver(mpsc::Receiver<PendingRegistration>);

/// Creates the channel of the registering task.
pub(crate) fn channel() -> (Registrations, RegistrationReceiver) {
    let (sender, receiver) = mpsc::channel(CHANNEL_CAPACITY);
    (Registrations(sender), RegistrationReceiver(receiver))
}

impl Registrations {
    /// Opens or continues the session of a gateway. Returns `None` if the service stops.
    pub(crate) async fn register(&self, registration: Registration) -> Option<SessionResult> {
        call(&self.0, |answer| PendingRegistration { registration, answer }).await
    }
}

/// Registers gateways until the service stops.
pub(crate) async fn register_forever(lifecycle: Lifecycle, mut receiver: RegistrationReceiver) {
    let register_all = async {
        let mut waiting = Vec::new();
        while receiver.0.recv_many(&mut waiting, BATCH).await > 0 {
            while !waiting.is_empty() {
                if let Some(error) = register_batch(&lifecycle, next(&mut waiting)).await {
                    // Registrations that arrived meanwhile would fail in the same way, after the
                    // same wait.
                    waiting.extend(std::iter::from_fn(|| receiver.0.try_recv().ok()));
                    waiting.drain(..).for_each(|pending| _ = pending.answer.send(Err(error.clone().into())));
                }
            }
        }
    };
    tokio::select! {
        () = lifecycle.context.stopping.cancelled() => {}
        () = register_all => {}
    }
}

/// Takes the next batch. A batch contains each worker name once, so that a later registration sees
/// the result of an earlier one. Registrations of ended streams are dropped.
fn next(waiting: &mut Vec<PendingRegistration>) -> Vec<PendingRegistration> {
    let mut names = HashSet::new();
    let there = std::mem::take(waiting).into_iter().filter(|pending| !pending.answer.is_closed());
    let (now, later) = there.partition(|pending| names.insert(pending.registration.name.clone()));
    *waiting = later;
    now
}

/// Registers a batch and sends the answers. Returns the database error if the database is
/// unavailable.
async fn register_batch(lifecycle: &Lifecycle, pending: Vec<PendingRegistration>) -> Option<DbErr> {
    if pending.is_empty() {
        return None;
    }
    let mut unavailable = None;
    let registrations: Vec<_> = pending.iter().map(|pending| &pending.registration).collect();
    let answers = match register(lifecycle, &registrations).await {
        Err(error) if db::is_retryable(&error) => {
            let answers = registrations.iter().map(|_| Err(error.clone().into())).collect();
            unavailable = Some(error);
            answers
        }
        // One failed registration fails the transaction, so each registration is tried alone.
        Err(_) if registrations.len() > 1 => {
            let mut answers = Vec::with_capacity(registrations.len());
            for registration in registrations {
                match register(lifecycle, &[registration]).await {
                    Ok(one) => answers.extend(one),
                    Err(error) => answers.push(Err(error.into())),
                }
            }
            answers
        }
        Err(error) => vec![Err(error.into())],
        Ok(answers) => answers,
    };
    for (pending, answer) in pending.into_iter().zip(answers) {
        // A stream that has ended needs no answer.
        _ = pending.answer.send(answer);
    }
    if unavailable.is_none()
        && let Err(error) = lifecycle.end_stranded_leases().await
    {
        tracing::warn!(error = %error, "cannot end the leases of past incarnations now; they are ended later");
    }
    unavailable
}

async fn register(
    lifecycle: &Lifecycle,
    registrations: &[&Registration],
) -> Result<Vec<SessionResult>, DbErr> {
    let once = async || {
        let register = async |txn: Transaction| {
            let (now, mut effects) = (Timestamp::now(), Effects::default());
            let sessions =
                workers::register(&txn, registrations, &lifecycle.context.config, now, &mut effects).await?;
            Ok::<_, DbErr>(((now, sessions), effects))
        };
        lifecycle.context.change(register).await
    };
    let (now, sessions) = match once().await {
        // Another replica inserted one of these names first, so the worker exists now.
        Err(error) if is_duplicate(&error) => once().await?,
        result => result?,
    };
    Ok(sessions.into_iter().map(|session| session.map(|session| (session, now))).collect())
}

#[cfg(test)]
mod tests {
    use crate::workers::revisions;
    use db::Database;
    use domain::worker::Labels;
    use domain::{GatewayInstance, WorkerId};
    use sea_orm::EntityTrait;
    use testing::databases::TestDatabase;

    use super::*;
    use crate::config::Config;
    use crate::db::entity::worker;
    use crate::workers::test_support::registration;

    #[tokio::test]
    async fn registration_of_ended_stream_is_dropped() {
        let (registrations, mut receiver) = channel();
        let mut calls = ["one", "gone", "gone", "two", "one"]
            .map(|name| Box::pin(registrations.register(registration(name))))
            .into_iter()
            .collect::<Vec<_>>();
        for call in &mut calls {
            assert!(futures::poll!(call).is_pending());
        }
        let names = |pending: &[PendingRegistration]| {
            pending.iter().map(|pending| pending.registration.name.clone()).collect::<Vec<_>>()
        };
        let mut waiting = Vec::new();
        receiver.0.recv_many(&mut waiting, BATCH).await;
        drop(calls.remove(1));
        assert_eq!(names(&next(&mut waiting)), ["one", "gone", "two"]);
        assert_eq!(names(&waiting), ["one"], "the second registration of a name is next");
        drop(calls);
        assert_eq!(names(&next(&mut waiting)), [""; 0]);
        assert!(waiting.is_empty());
    }

    async fn batch_registers_some_and_rejects_others(database: TestDatabase) {
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let config = Config::new(&database.url, "");
        let register_all = async |registrations: &[&Registration]| {
            let registered = db.write(async |txn| {
                let mut effects = Effects::default();
                let now = Timestamp::now();
                let sessions = workers::register(&txn, registrations, &config, now, &mut effects).await?;
                Ok::<_, DbErr>((sessions, effects.workers))
            });
            registered.await.expect("registered or rejected")
        };
        let revision = async || revisions::revisions(db.read()).await.expect("revisions").last;
        let before = revision().await;
        let (one, two, three) = (registration("one"), registration("two"), registration("three"));
        let (first, changed) = register_all(&[&one, &two]).await;
        let first: Vec<_> = first.into_iter().map(|session| session.expect("registered")).collect();
        assert_eq!(changed, first.iter().map(|session| session.worker).collect::<Vec<_>>());
        assert_eq!(revision().await, before + 1, "the batch is one change");

        let of_a_team = Labels { team: Some("theirs".to_owned()), ..one.labels.clone() };
        let of_a_team = Registration { labels: of_a_team, ..one };
        let standby = Registration { instance: GatewayInstance::new(), ..two.clone() };
        let (refused, changed) = register_all(&[&of_a_team, &standby]).await;
        assert!(matches!(*refused, [Err(SessionError::OtherTeam), Err(SessionError::AlreadyAttended)]));
        assert_eq!((changed, revision().await), (vec![], before + 1));

        let (again, changed) = register_all(&[&of_a_team, &two, &three]).await;
        let [Err(SessionError::OtherTeam), Ok(second), Ok(third)] = &*again else { panic!("{again:?}") };
        assert_eq!((second, third.worker != second.worker), (&first[1], true));
        assert_eq!(changed, [second.worker, third.worker]);
        let rows = worker::Entity::find().all(db.read()).await.expect("workers");
        let generation = |id: WorkerId| rows.iter().find(|row| row.id == id.uuid()).map(|row| row.generation);
        let generations = [&first[0], second, third].map(|session| generation(session.worker));
        assert_eq!(generations, [Some(1), Some(2), Some(1)], "rejected, continued and new");
    }

    #[tokio::test]
    async fn batch_registers_some_and_rejects_others_sqlite() {
        batch_registers_some_and_rejects_others(testing::databases::sqlite()).await;
    }

    #[tokio::test]
    async fn batch_registers_some_and_rejects_others_postgres() {
        batch_registers_some_and_rejects_others(testing::databases::postgres().await).await;
    }
}
