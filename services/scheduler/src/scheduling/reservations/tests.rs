use testing::databases::TestDatabase;

use super::*;
use crate::placement::Shape;
use crate::placement::tests::{index, parts, shape_with_memory, with_memory};

const FULL: Timestamp = Timestamp(1_000_000_000_000);

/// A replica with its own index of full workers.
struct Replica {
    reservations: Reservations,
    queue: Queue,
    workers: Index,
}

impl Replica {
    fn new(id: u128, workers: usize) -> Self {
        let replica = Uuid::from_u128(id);
        let reservations = Reservations { replica, ..Reservations::new(FULL) };
        let names = (0..workers).map(|n| with_memory(&format!("{n}"), 4, 100));
        Self { reservations, queue: Queue::new(RETRY_DELAY, HashMap::new()), workers: index(names) }
    }

    /// Gives a turn to a request for 80 of the 100 bytes of a worker, which finds no worker. The
    /// request is the head of its line.
    fn turn(&mut self, id: Uuid, now: Timestamp) -> Vec<String> {
        self.turn_of_team(&id.to_string(), id, now)
    }

    /// Gives a turn to such a request of a team. Requests of one team share a line.
    fn turn_of_team(&mut self, team: &str, id: Uuid, now: Timestamp) -> Vec<String> {
        let large = parts(&[(Shape { team: team.to_owned(), ..shape_with_memory(80) }, "")]);
        self.queue.put(WaitingRequest {
            id,
            is_elsewhere: false,
            others: vec![],
            sequence: id,
            priority: 0,
            since: Timestamp(0),
            demand: large[0].demand.clone(),
            locations: [].into(),
            must_start: false,
            reported: [].into(),
            traceparent: String::new(),
            spec_bytes: None,
        });
        self.reservations.inherit(id, &self.queue);
        self.reservations.reserve(id, &large, &mut self.workers, now);
        self.kept(id)
    }

    fn kept(&self, id: Uuid) -> Vec<String> {
        let mut names = self.workers.reserved_for(id);
        names.sort();
        names
    }

    /// Starts a pass, before [`Replica::turn`]s.
    fn begin_pass(&mut self, now: Timestamp) {
        self.reservations.begin_pass(now);
        let kept: Vec<_> = self.workers.reserved().collect();
        kept.into_iter().for_each(|(worker, _)| self.workers.reserve(worker, None));
    }

    fn set_tasks(&mut self, name: &str, tasks: u32) {
        let worker = self.workers.workers().find(|worker| worker.name == name).expect("known");
        let (id, load) = (worker.id, crate::placement::Load { tasks, ..worker.load });
        self.workers.load(id, load);
    }
}

#[test]
fn reservation_ends_and_another_worker_is_tried() {
    let mut replica = Replica::new(1, 2);
    let large = Uuid::from_u128(7);
    let mut at = FULL;
    let mut after = |replica: &mut Replica, wait: Duration| {
        at = at + wait;
        replica.begin_pass(at);
        replica.turn(large, at)
    };
    let first = after(&mut replica, Duration::ZERO);
    assert_eq!(first.len(), 1);
    let little = Duration::from_secs(1);
    assert_eq!(after(&mut replica, RESERVATION_TIME - little), first);
    assert!(replica.reservations.is_due(replica.reservations.pass_at + little));
    let second = after(&mut replica, little);
    assert!(second.len() == 1 && second != first, "{second:?} after {first:?}");
    assert_eq!(after(&mut replica, RESERVATION_TIME - little), second);
    assert_eq!(after(&mut replica, little), [""; 0], "both were tried");
    assert_eq!(after(&mut replica, RESERVATION_TIME - little), [""; 0], "no reservation during the rest");
    assert_eq!(after(&mut replica, little).len(), 1, "the choice starts again");
}

#[test]
fn worker_that_became_too_small_is_not_reserved() {
    let mut replica = Replica::new(1, 1);
    let (large, now) = (Uuid::from_u128(7), FULL);
    assert_eq!(replica.turn(large, now), ["0"]);
    replica.begin_pass(now);
    let mut worker = replica.workers.workers().next().expect("one").clone();
    worker.capacity.memory_bytes = Some(60);
    replica.workers.put(worker);
    assert_eq!(replica.turn(large, now), [""; 0]);
    assert!(replica.reservations.is_due(now + RETRY_DELAY), "the capacity may rise again");
    assert_eq!(replica.reservations.own[&large].workers, BTreeSet::new());
}

#[test]
fn first_of_line_takes_over_reservation_of_another() {
    let mut replica = Replica::new(1, 1);
    let (first, before) = (Uuid::from_u128(8), Uuid::from_u128(7));
    assert_eq!(replica.turn_of_team("main", first, FULL), ["0"]);
    // The request is ahead of the other, which gets no more turns.
    let later = FULL + RESERVATION_TIME;
    replica.begin_pass(later - Duration::from_secs(1));
    assert_eq!(
        replica.turn_of_team("main", before, later - Duration::from_secs(1)),
        ["0"],
        "reserved for the head of the line"
    );
    assert_eq!(replica.kept(first), [""; 0]);
    replica.begin_pass(later);
    assert_eq!(
        replica.turn_of_team("main", before, later),
        [""; 0],
        "the time since the first reservation counts"
    );
}

#[test]
fn replaced_worker_does_not_extend_reservation() {
    let mut replica = Replica::new(1, 2);
    let large = Uuid::from_u128(7);
    let first = replica.turn(large, FULL);
    let shrink = |replica: &mut Replica, name: &str, bytes| {
        let known = replica.workers.workers().find(|worker| worker.name == name).expect("known");
        let mut worker = known.clone();
        worker.capacity.memory_bytes = Some(bytes);
        replica.workers.put(worker);
    };
    shrink(&mut replica, &first[0], 60);
    let half = FULL + RESERVATION_TIME / 2;
    replica.begin_pass(half);
    let second = replica.turn(large, half);
    assert!(second.len() == 1 && second != first, "{second:?} after {first:?}");
    shrink(&mut replica, &first[0], 100);
    replica.begin_pass(FULL + RESERVATION_TIME);
    assert_eq!(
        replica.turn(large, FULL + RESERVATION_TIME),
        first,
        "the hour of the first reservation counts"
    );
}

#[test]
fn reservations_are_limited_per_pass_and_kind() {
    let mut replica = Replica::new(1, 300);
    let waiting: Vec<_> = (0..MAX_CHOICES as u128 + 5).map(Uuid::from_u128).collect();
    let kept = |replica: &Replica| waiting.iter().filter(|id| !replica.kept(**id).is_empty()).count();
    waiting.iter().for_each(|id| _ = replica.turn(*id, FULL));
    assert_eq!(kept(&replica), MAX_CHOICES);
    assert!(replica.reservations.is_due(FULL), "more requests wait");
    replica.begin_pass(FULL);
    waiting.iter().for_each(|id| _ = replica.turn(*id, FULL));
    assert_eq!(kept(&replica), waiting.len(), "each request has its own");
    assert!(!replica.reservations.is_due(FULL));
    let more: Vec<_> = (100..110).map(Uuid::from_u128).collect();
    replica.begin_pass(FULL);
    waiting.iter().chain(&more).for_each(|id| _ = replica.turn(*id, FULL));
    assert_eq!(replica.workers.reserved().count(), 30, "one in ten of three hundred");
}

/// Reads the table, and writes the changes.
async fn tend(replica: &mut Replica, db: &db::Database, now: Timestamp) {
    let rows = reservation::Entity::find().all(db.read()).await.expect("rows");
    replica.reservations.read(&rows, now);
    Difference::of(&replica.reservations, &rows, now).write(db, now).await.expect("written");
    replica.reservations.apply(&replica.queue, &mut replica.workers);
}

async fn replicas_agree(database: TestDatabase) {
    let db = db::Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let [mut one, mut two] = [1, 2].map(|id| Replica::new(id, 40));
    // Both replicas know the same workers.
    two.workers = index(one.workers.workers().cloned());
    let (first, second, now) = (Uuid::from_u128(7), Uuid::from_u128(8), FULL);

    // Both replicas reserve for the same request before they see each other.
    let chosen = one.turn(first, now);
    two.set_tasks(&chosen[0], 5);
    let other = two.turn(first, now);
    assert_ne!(chosen, other);
    for replica in [&one, &two] {
        Difference::of(&replica.reservations, &[], now).write(&db, now).await.expect("written");
    }
    tend(&mut two, &db, now).await;
    tend(&mut one, &db, now).await;
    assert_eq!(
        (one.kept(first), two.kept(first)),
        (chosen.clone(), chosen.clone()),
        "the lower id keeps its reservation"
    );
    for _ in 0..2 {
        tend(&mut one, &db, now).await;
        tend(&mut two, &db, now).await;
    }
    let rows = reservation::Entity::find().all(db.read()).await.expect("rows");
    assert_eq!(rows.len(), 1, "{rows:?}");
    assert_eq!(two.turn(first, now), chosen, "no second choice");

    // Both replicas choose the same worker for two requests. The first one to write its row keeps
    // it.
    two.begin_pass(now);
    one.begin_pass(now);
    assert_eq!(one.turn(first, now), chosen);
    assert_eq!(two.turn(first, now), chosen);
    let (mine, theirs) = (one.turn(second, now), two.turn(Uuid::from_u128(9), now));
    assert_eq!(mine, theirs);
    tend(&mut two, &db, now).await;
    tend(&mut one, &db, now).await;
    assert_eq!((one.kept(Uuid::from_u128(9)), one.kept(second)), (theirs, vec![]));
    assert_ne!(one.turn(second, now), mine, "another worker");
    // A replica does not reserve for a request that another replica has reserved for, regardless of
    // ids.
    assert_eq!(one.turn(Uuid::from_u128(9), now), mine);

    // Rows that no replica extends expire. Extended rows stay.
    let later = now + Duration::from_secs(20);
    tend(&mut one, &db, later).await;
    let later = now + Duration::from_secs(35);
    tend(&mut one, &db, later).await;
    assert_eq!(one.kept(Uuid::from_u128(9)), [""; 0]);
    assert_eq!((one.kept(first).len(), one.kept(second).len()), (1, 1));
    let rows = reservation::Entity::find().all(db.read()).await.expect("rows");
    assert_eq!(rows.len(), 2, "{rows:?}");

    // After a replica has tried all workers, no replica reserves for a time.
    let third = Uuid::from_u128(10);
    let mut resting = Reservation::new(later + RESERVATION_TIME);
    (resting.rests, resting.tried) = (true, one.workers.workers().map(|worker| worker.id).collect());
    one.reservations.own.insert(third, resting);
    one.begin_pass(later);
    assert_eq!(one.turn(third, later), [""; 0]);
    tend(&mut one, &db, later).await;
    tend(&mut two, &db, later).await;
    two.begin_pass(later);
    assert_eq!(two.turn(third, later), [""; 0]);
    assert!(!two.reservations.own.contains_key(&third));
    let reservations = reservation::all(db.read(), later).await.expect("rows");
    assert!(
        reservations.values().all(|request| *request != third),
        "no worker is reserved: {reservations:?}"
    );
    one.reservations.own.remove(&third);

    // A reservation that one replica ends is ended for all.
    one.reservations.own.remove(&first);
    one.reservations.own.remove(&second);
    tend(&mut one, &db, later).await;
    tend(&mut two, &db, later).await;
    assert_eq!(two.kept(first), [""; 0]);
    assert_eq!(two.kept(second), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_agree_sqlite() {
    replicas_agree(testing::databases::sqlite()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_agree_postgres() {
    replicas_agree(testing::databases::postgres().await).await;
}
