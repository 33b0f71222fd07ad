use testing::databases::TestDatabase;

use super::*;
use crate::placement::Shape;
use crate::placement::tests::{asking, index, parts, with_memory};

const FULL: Timestamp = Timestamp(1_000_000_000_000);

/// Replicas that look at workers of their own, all of which are full.
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
        Self { reservations, queue: Queue::new(AGAIN, HashMap::new()), workers: index(names) }
    }

    /// One that asks for 80 of the 100 bytes of a worker has its turn, and finds nothing. It is the first of its line.
    fn turn(&mut self, id: Uuid, now: Timestamp) -> Vec<String> {
        self.turn_of_team(&id.to_string(), id, now)
    }

    /// The same. Those of one team wait in one line.
    fn turn_of_team(&mut self, team: &str, id: Uuid, now: Timestamp) -> Vec<String> {
        let large = parts(&[(Shape { team: team.to_owned(), ..asking(80) }, "")]);
        self.queue.put(Waiting {
            id,
            is_elsewhere: false,
            others: vec![],
            sequence: id,
            priority: 0,
            since: Timestamp(0),
            demand: large[0].demand.clone(),
            locations: [].into(),
            must_start: false,
            told: [].into(),
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

    /// As before [`Replica::turn`]s.
    fn look(&mut self, now: Timestamp) {
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
        replica.look(at);
        replica.turn(large, at)
    };
    let first = after(&mut replica, Duration::ZERO);
    assert_eq!(first.len(), 1);
    let little = Duration::from_secs(1);
    assert_eq!(after(&mut replica, HELD - little), first);
    assert!(replica.reservations.is_due(replica.reservations.pass_at + little));
    let second = after(&mut replica, little);
    assert!(second.len() == 1 && second != first, "{second:?} after {first:?}");
    assert_eq!(after(&mut replica, HELD - little), second);
    assert_eq!(after(&mut replica, little), [""; 0], "both were tried");
    assert_eq!(after(&mut replica, HELD - little), [""; 0], "others have their turns");
    assert_eq!(after(&mut replica, little).len(), 1, "it begins again");
}

#[test]
fn nothing_is_reserved_on_worker_that_became_too_small() {
    let mut replica = Replica::new(1, 1);
    let (large, now) = (Uuid::from_u128(7), FULL);
    assert_eq!(replica.turn(large, now), ["0"]);
    replica.look(now);
    let mut worker = replica.workers.workers().next().expect("one").clone();
    worker.capacity.memory_bytes = Some(60);
    replica.workers.put(worker);
    assert_eq!(replica.turn(large, now), [""; 0]);
    assert!(replica.reservations.is_due(now + AGAIN), "it may have more again");
    assert_eq!(replica.reservations.own[&large].workers, BTreeSet::new());
}

#[test]
fn first_of_line_takes_over_reservation_of_another() {
    let mut replica = Replica::new(1, 1);
    let (first, before) = (Uuid::from_u128(8), Uuid::from_u128(7));
    assert_eq!(replica.turn_of_team("main", first, FULL), ["0"]);
    // It comes before the other, which has no more turns.
    let later = FULL + HELD;
    replica.look(later - Duration::from_secs(1));
    assert_eq!(
        replica.turn_of_team("main", before, later - Duration::from_secs(1)),
        ["0"],
        "and not for the other"
    );
    assert_eq!(replica.kept(first), [""; 0]);
    replica.look(later);
    assert_eq!(replica.turn_of_team("main", before, later), [""; 0], "since it was reserved for the other");
}

#[test]
fn worker_that_is_replaced_does_not_prolong_reservation() {
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
    let half = FULL + HELD / 2;
    replica.look(half);
    let second = replica.turn(large, half);
    assert!(second.len() == 1 && second != first, "{second:?} after {first:?}");
    shrink(&mut replica, &first[0], 100);
    replica.look(FULL + HELD);
    assert_eq!(replica.turn(large, FULL + HELD), first, "the hour is that of the first");
}

#[test]
fn one_pass_makes_few_reservations_and_one_in_ten_workers_has_one() {
    let mut replica = Replica::new(1, 300);
    let waiting: Vec<_> = (0..CHOICES as u128 + 5).map(Uuid::from_u128).collect();
    let kept = |replica: &Replica| waiting.iter().filter(|id| !replica.kept(**id).is_empty()).count();
    waiting.iter().for_each(|id| _ = replica.turn(*id, FULL));
    assert_eq!(kept(&replica), CHOICES);
    assert!(replica.reservations.is_due(FULL), "there are more");
    replica.look(FULL);
    waiting.iter().for_each(|id| _ = replica.turn(*id, FULL));
    assert_eq!(kept(&replica), waiting.len(), "which have each its own");
    assert!(!replica.reservations.is_due(FULL));
    let more: Vec<_> = (100..110).map(Uuid::from_u128).collect();
    replica.look(FULL);
    waiting.iter().chain(&more).for_each(|id| _ = replica.turn(*id, FULL));
    assert_eq!(replica.workers.reserved().count(), 30, "of three hundred");
}

/// Reads the table, and writes what it lacks.
async fn tend(replica: &mut Replica, db: &db::Database, now: Timestamp) {
    let rows = reservation::Entity::find().all(db.read()).await.expect("rows");
    replica.reservations.read(&rows, now);
    Difference::of(&replica.reservations, &rows, now).write(db, now).await.expect("written");
    replica.reservations.apply(&replica.queue, &mut replica.workers);
}

async fn replicas_agree(database: TestDatabase) {
    let db = db::Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let [mut one, mut two] = [1, 2].map(|id| Replica::new(id, 40));
    // Both know the same workers.
    two.workers = index(one.workers.workers().cloned());
    let (first, second, now) = (Uuid::from_u128(7), Uuid::from_u128(8), FULL);

    // Both choose for the same, before they know of each other.
    let chosen = one.turn(first, now);
    two.set_tasks(&chosen[0], 5);
    let other = two.turn(first, now);
    assert_ne!(chosen, other);
    for replica in [&one, &two] {
        Difference::of(&replica.reservations, &[], now).write(&db, now).await.expect("written");
    }
    tend(&mut two, &db, now).await;
    tend(&mut one, &db, now).await;
    assert_eq!((one.kept(first), two.kept(first)), (chosen.clone(), chosen.clone()), "the lower id goes on");
    for _ in 0..2 {
        tend(&mut one, &db, now).await;
        tend(&mut two, &db, now).await;
    }
    let rows = reservation::Entity::find().all(db.read()).await.expect("rows");
    assert_eq!(rows.len(), 1, "{rows:?}");
    assert_eq!(two.turn(first, now), chosen, "it does not choose again");

    // Both choose the same worker, for two: the first that says so has it.
    two.look(now);
    one.look(now);
    assert_eq!(one.turn(first, now), chosen);
    assert_eq!(two.turn(first, now), chosen);
    let (mine, theirs) = (one.turn(second, now), two.turn(Uuid::from_u128(9), now));
    assert_eq!(mine, theirs);
    tend(&mut two, &db, now).await;
    tend(&mut one, &db, now).await;
    assert_eq!((one.kept(Uuid::from_u128(9)), one.kept(second)), (theirs, vec![]));
    assert_ne!(one.turn(second, now), mine, "it has another");
    // Nor does it choose for one for which another has said so, whatever its id.
    assert_eq!(one.turn(Uuid::from_u128(9), now), mine);

    // What nobody prolongs is over; what one prolongs is not.
    let later = now + Duration::from_secs(20);
    tend(&mut one, &db, later).await;
    let later = now + Duration::from_secs(35);
    tend(&mut one, &db, later).await;
    assert_eq!(one.kept(Uuid::from_u128(9)), [""; 0]);
    assert_eq!((one.kept(first).len(), one.kept(second).len()), (1, 1));
    let rows = reservation::Entity::find().all(db.read()).await.expect("rows");
    assert_eq!(rows.len(), 2, "{rows:?}");

    // Where others were tried in vain nobody chooses for a time.
    let third = Uuid::from_u128(10);
    let mut resting = Reservation::new(later + HELD);
    (resting.rests, resting.tried) = (true, one.workers.workers().map(|worker| worker.id).collect());
    one.reservations.own.insert(third, resting);
    one.look(later);
    assert_eq!(one.turn(third, later), [""; 0]);
    tend(&mut one, &db, later).await;
    tend(&mut two, &db, later).await;
    two.look(later);
    assert_eq!(two.turn(third, later), [""; 0]);
    assert!(!two.reservations.own.contains_key(&third));
    let told = reservation::all(db.read(), later).await.expect("rows");
    assert!(told.values().all(|whom| *whom != third), "no worker is reserved: {told:?}");
    one.reservations.own.remove(&third);

    // And what one lets go is so for all.
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
