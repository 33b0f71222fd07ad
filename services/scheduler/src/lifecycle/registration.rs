//! Registrations: gateways are let in, many at a time.
//!
//! Each makes a change that watchers of workers hear of, and those are made one after the other ([`crate::workers::revisions::changed`]). So that all can
//! come back within the TTL when a scheduler was away, one task of each replica lets all in that came meanwhile, in one transaction.

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

/// How many are let in at a time.
const BATCH: usize = 64;

/// How many may wait. Further streams wait until there is room.
const WAITING: usize = 1024;

/// A session, and as of when it was opened or continued.
type SessionResult = Result<(SessionClaims, Timestamp), SessionError>;

/// A gateway that wants to be let in.
#[derive(Debug)]
struct PendingRegistration {
    hello: Registration,
    answer: oneshot::Sender<SessionResult>,
}

/// Where gateways ask to be let in. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Registrations(mpsc::Sender<PendingRegistration>);

/// Who asked, for [`register_forever`].
#[derive(Debug)]
pub(crate) struct RegistrationReceiver(mpsc::Receiver<PendingRegistration>);

/// A way to ask, and its end.
pub(crate) fn channel() -> (Registrations, RegistrationReceiver) {
    let (sender, receiver) = mpsc::channel(WAITING);
    (Registrations(sender), RegistrationReceiver(receiver))
}

impl Registrations {
    /// Opens or continues the session of a gateway. `None`: the service stops.
    pub(crate) async fn ask(&self, hello: Registration) -> Option<SessionResult> {
        call(&self.0, |answer| PendingRegistration { hello, answer }).await
    }
}

/// Lets gateways in, until the service stops.
pub(crate) async fn register_forever(lifecycle: Lifecycle, mut asked: RegistrationReceiver) {
    let let_in = async {
        let mut waiting = Vec::new();
        while asked.0.recv_many(&mut waiting, BATCH).await > 0 {
            while !waiting.is_empty() {
                if let Some(error) = answer(&lifecycle, next(&mut waiting)).await {
                    // Who has asked meanwhile would wait as long, and hear the same.
                    waiting.extend(std::iter::from_fn(|| asked.0.try_recv().ok()));
                    waiting.drain(..).for_each(|asking| _ = asking.answer.send(Err(error.clone().into())));
                }
            }
        }
    };
    tokio::select! {
        () = lifecycle.context.stopping.cancelled() => {}
        () = let_in => {}
    }
}

/// Takes those that are let in together. Of several of one name each finds what the one before it left, and whose stream has ended meanwhile
/// finds nothing.
fn next(waiting: &mut Vec<PendingRegistration>) -> Vec<PendingRegistration> {
    let mut names = HashSet::new();
    let there = std::mem::take(waiting).into_iter().filter(|asking| !asking.answer.is_closed());
    let (now, later) = there.partition(|asking| names.insert(asking.hello.name.clone()));
    *waiting = later;
    now
}

/// Answers why the database did not take it, where that would be so of anything else.
async fn answer(lifecycle: &Lifecycle, asking: Vec<PendingRegistration>) -> Option<DbErr> {
    if asking.is_empty() {
        return None;
    }
    let mut away = None;
    let hellos: Vec<_> = asking.iter().map(|asking| &asking.hello).collect();
    let answers = match let_in(lifecycle, &hellos).await {
        Err(error) if db::is_retryable(&error) => {
            let answers = hellos.iter().map(|_| Err(error.clone().into())).collect();
            away = Some(error);
            answers
        }
        // One that failed takes the others along, and they are not to blame.
        Err(_) if hellos.len() > 1 => {
            let mut answers = Vec::with_capacity(hellos.len());
            for hello in hellos {
                match let_in(lifecycle, &[hello]).await {
                    Ok(one) => answers.extend(one),
                    Err(error) => answers.push(Err(error.into())),
                }
            }
            answers
        }
        Err(error) => vec![Err(error.into())],
        Ok(answers) => answers,
    };
    for (asking, answer) in asking.into_iter().zip(answers) {
        // A stream that has ended needs no answer.
        _ = asking.answer.send(answer);
    }
    if away.is_none()
        && let Err(error) = lifecycle.end_orphans().await
    {
        tracing::warn!(error = %error, "leases of workers that began anew end with the next look");
    }
    away
}

async fn let_in(lifecycle: &Lifecycle, hellos: &[&Registration]) -> Result<Vec<SessionResult>, DbErr> {
    let once = async || {
        let let_in = async |txn: Transaction| {
            let (now, mut effects) = (Timestamp::now(), Effects::default());
            let sessions =
                workers::register(&txn, hellos, &lifecycle.context.config, now, &mut effects).await?;
            Ok::<_, DbErr>(((now, sessions), effects))
        };
        lifecycle.context.change(let_in).await
    };
    let (now, sessions) = match once().await {
        // Another replica was faster with one of these names. It is known now.
        Err(error) if is_duplicate(&error) => once().await?,
        let_in => let_in?,
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
    use crate::workers::test_support::hello;

    #[tokio::test]
    async fn whose_stream_has_ended_is_not_let_in() {
        let (hellos, mut asked) = channel();
        let mut ask = ["one", "gone", "gone", "two", "one"]
            .map(|name| Box::pin(hellos.ask(hello(name))))
            .into_iter()
            .collect::<Vec<_>>();
        for ask in &mut ask {
            assert!(futures::poll!(ask).is_pending());
        }
        let names = |asking: &[PendingRegistration]| {
            asking.iter().map(|asking| asking.hello.name.clone()).collect::<Vec<_>>()
        };
        let mut waiting = Vec::new();
        asked.0.recv_many(&mut waiting, BATCH).await;
        drop(ask.remove(1));
        assert_eq!(names(&next(&mut waiting)), ["one", "gone", "two"]);
        assert_eq!(names(&waiting), ["one"], "another of that name is next");
        drop(ask);
        assert_eq!(names(&next(&mut waiting)), [""; 0]);
        assert!(waiting.is_empty());
    }

    async fn several_are_let_in_and_some_refused(database: TestDatabase) {
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let config = Config::new(&database.url, "");
        let say = async |hellos: &[&Registration]| {
            let said = db.write(async |txn| {
                let mut effects = Effects::default();
                let now = Timestamp::now();
                let let_in = workers::register(&txn, hellos, &config, now, &mut effects).await?;
                Ok::<_, DbErr>((let_in, effects.workers))
            });
            said.await.expect("let in or refused")
        };
        let revision = async || revisions::revisions(db.read()).await.expect("revisions").last;
        let before = revision().await;
        let (one, two, three) = (hello("one"), hello("two"), hello("three"));
        let (first, changed) = say(&[&one, &two]).await;
        let first: Vec<_> = first.into_iter().map(|session| session.expect("let in")).collect();
        assert_eq!(changed, first.iter().map(|session| session.worker).collect::<Vec<_>>());
        assert_eq!(revision().await, before + 1, "they are one change");

        let of_a_team = Labels { team: Some("theirs".to_owned()), ..one.labels.clone() };
        let of_a_team = Registration { labels: of_a_team, ..one };
        let standby = Registration { instance: GatewayInstance::new(), ..two.clone() };
        let (refused, changed) = say(&[&of_a_team, &standby]).await;
        assert!(matches!(*refused, [Err(SessionError::OtherTeam), Err(SessionError::AlreadyAttended)]));
        assert_eq!((changed, revision().await), (vec![], before + 1));

        let (again, changed) = say(&[&of_a_team, &two, &three]).await;
        let [Err(SessionError::OtherTeam), Ok(second), Ok(third)] = &*again else { panic!("{again:?}") };
        assert_eq!((second, third.worker != second.worker), (&first[1], true));
        assert_eq!(changed, [second.worker, third.worker]);
        let rows = worker::Entity::find().all(db.read()).await.expect("workers");
        let generation = |id: WorkerId| rows.iter().find(|row| row.id == id.uuid()).map(|row| row.generation);
        let generations = [&first[0], second, third].map(|session| generation(session.worker));
        assert_eq!(generations, [Some(1), Some(2), Some(1)], "it was refused, came back, and is new");
    }

    #[tokio::test]
    async fn several_are_let_in_and_some_refused_sqlite() {
        several_are_let_in_and_some_refused(testing::databases::sqlite()).await;
    }

    #[tokio::test]
    async fn several_are_let_in_and_some_refused_postgres() {
        several_are_let_in_and_some_refused(testing::databases::postgres().await).await;
    }
}
