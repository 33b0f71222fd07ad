//! Random operations on a real store, compared with a model of references and disks.
//!
//! ```text
//! operations    operations, as data
//! generator     generation of operations from a seed
//! state         the model: permitted answers and certain facts
//! check         comparison of the store's lists with the model
//! world         the replicas of the store, and the gateways
//! shrink        reduction of a failing list of operations
//! cases         recorded lists
//! ```
//!
//! After every operation or concurrent batch, these facts must hold:
//!
//! - An artifact that a build or cache owns, a workload pins, or an attempt's volume starts with,
//!   is not marked. It has its sealed bytes, and is located where it is on a disk.
//! - The store lists every certain owner.
//! - Items on a disk are not forgotten, and forgotten items do not return.
//!
//! In the end, only owned items are left. Without owners, nothing is left.
//!
//! Two replicas of the store serve one database, and are killed at any time. A batch is correct if
//! the model accepts its answers in some order. Later answers may exclude orders, so that the test
//! tracks all possible states.
//!
//! Environment variables:
//!
//! - `GANTRY_STEPS`: number of operations per seed.
//! - `GANTRY_SEEDS`: number of seeds. By default one seed has 2000 operations and the others fewer,
//!   four at once.
//! - `GANTRY_SEED`: runs one seed again.
//! - `GANTRY_FIRST_SEED`: the first seed. By default it is random.
//! - `GANTRY_SOAK`: hours for which `soak` runs new seeds (1).
//! - `GANTRY_SHRINK`: maximum time of shrinking a failing list, in seconds (45, and 600 in a soak).
//!
//! A shrunk list is printed as code for `cases.rs`. The seed is printed as soon as it fails.

mod cases;
mod check;
mod generator;
mod operations;
mod shrink;
mod state;
mod world;

use std::collections::BTreeSet;
use std::fmt;
use std::io::Write;
use std::pin::Pin;
use std::time::{Duration, Instant};

use testing::databases::{self, TestDatabase};
use testing::seeds::{self, setting};

use self::check::History;
use self::generator::Generator;
use self::operations::{Delivery, Operation, Outputs, Status, WORKERS};
use self::state::{Outcome, State, Violation};
use self::world::{REMEMBER, World};

/// Numbers of operations of a long and a short seed. Each starts with an empty store, and ends
/// everything.
const STEPS: u64 = 2000;
const FEW_STEPS: u64 = 250;

/// One of this many seeds is long, starting with the first.
const LONG: u64 = 12;

/// Default number of seeds. `integration-tests/run.sh` uses the same number.
const SEEDS: u64 = 4;

/// Default times for shrinking a failing list, in a normal run and in a soak.
const SHRINK: Duration = Duration::from_secs(45);
const SHRINK_IN_A_SOAK: Duration = Duration::from_secs(600);

/// Maximum number of possible states that are tracked.
const STATES: usize = 32;

/// Maximum number of rounds of collecting, sweeping and reporting until nothing may be left.
const ROUNDS: usize = 60;

type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Prints a line to standard error at once, because captured output is lost if the process dies.
fn say(what: &str) {
    // A closed standard error is ignored.
    writeln!(std::io::stderr(), "{what}").ok();
}

/// Kinds of databases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Sqlite,
    Postgres,
}

impl Kind {
    async fn fresh(self) -> TestDatabase {
        match self {
            Self::Sqlite => databases::sqlite(),
            Self::Postgres => databases::postgres().await,
        }
    }

    /// Returns the module of the database's tests.
    fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
        }
    }
}

/// A failure after some operations.
#[derive(Debug)]
struct Failure {
    /// Number of applied operations.
    steps: usize,
    violation: Violation,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after {} operations: {}", self.steps, self.violation)
    }
}

/// Applies `operations` to a fresh store, and then lets everything end. Returns the impossible
/// operations.
async fn run(database: TestDatabase, operations: &[Operation]) -> Result<Vec<String>, Failure> {
    let mut run = Run::start(database).await;
    let mut result = Ok(());
    for (index, operation) in operations.iter().enumerate() {
        result = run.step(operation).await.map_err(|violation| Failure { steps: index + 1, violation });
        if result.is_err() {
            break;
        }
    }
    let skipped = std::mem::take(&mut run.skipped);
    if result.is_ok() {
        result =
            Box::pin(run.quiesce()).await.map_err(|violation| Failure { steps: operations.len(), violation });
    }
    run.world.end().await;
    result.map(|()| skipped)
}

struct Run {
    world: World,
    /// Possible states, one for each order of concurrent operations that explains all answers.
    /// Never empty.
    states: Vec<State>,
    history: History,
    /// Operations that were impossible because their subject was never created.
    skipped: Vec<String>,
}

impl Run {
    async fn start(database: TestDatabase) -> Self {
        let world = World::start(database).await;
        Self { world, states: vec![State::new(WORKERS)], history: History::default(), skipped: Vec::new() }
    }

    /// Returns the likeliest state.
    fn state(&self) -> &State {
        &self.states[0]
    }

    /// Applies one operation, and checks the store's lists.
    ///
    /// The future is on the heap, like that of every call. Otherwise they would exceed the stack of
    /// a test.
    fn step<'a>(&'a mut self, operation: &'a Operation) -> BoxFuture<'a, Result<(), Violation>> {
        Box::pin(async move {
            self.apply(operation).await?;
            // The clock's advance over the model must stay below the model's resolution.
            match self.world.is_ahead() {
                true => self.apply(&Operation::Advance { seconds: 1 }).await,
                false => Ok(()),
            }
        })
    }

    async fn apply(&mut self, operation: &Operation) -> Result<(), Violation> {
        let parts = match operation {
            Operation::Together(parts) => parts.as_slice(),
            one => std::slice::from_ref(one),
        };
        let perform = async |index: usize| match parts.get(index) {
            Some(part) => Box::pin(self.world.perform(self.state(), part)).await,
            None => Outcome::Skipped,
        };
        let (first, second, third, fourth) = tokio::join!(perform(0), perform(1), perform(2), perform(3));
        let outcomes = [first, second, third, fourth];
        let answered: Vec<_> = parts.iter().zip(&outcomes).collect();
        for (operation, _) in answered.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Skipped)) {
            self.skipped.push(format!("{operation:?}"));
        }
        if answered.iter().all(|(_, outcome)| matches!(outcome, Outcome::Skipped)) {
            return Ok(());
        }
        let view = self.world.view().await;
        let mut explained = Vec::new();
        let mut shown = None;
        // One rejection explains enough.
        let mut refused = None;
        for known in &self.states {
            let mut possible = Vec::new();
            if let Err(violation) = in_some_order(known, &answered, &mut possible) {
                refused.get_or_insert(violation);
            }
            for mut state in possible {
                let mut history = self.history.clone();
                match check::check(&mut state, &mut history, &view) {
                    Ok(()) if explained.contains(&state) => {}
                    Ok(()) => {
                        explained.push(state);
                        // Equal for all states.
                        shown = Some(history);
                    }
                    Err(violation) => _ = refused.get_or_insert(violation),
                }
            }
        }
        let Some(history) = shown else {
            return Err(refused.unwrap_or_else(|| Violation("there is no order".to_owned())));
        };
        explained.truncate(STATES);
        (self.states, self.history) = (explained, history);
        Ok(())
    }

    /// Ends everything except builds that own something, and then these builds.
    async fn quiesce(&mut self) -> Result<(), Violation> {
        let (workloads, of_owners) = self.unsettled();
        self.settle(&workloads).await?;
        for workload in &of_owners {
            for attempt in 0..=u8::MAX {
                if self.state().made_for(*workload, attempt).is_none() {
                    break;
                }
                self.step(&Operation::EndAttempt { workload: *workload, attempt }).await?;
            }
        }
        for build in self.of_any(State::in_doubt) {
            self.step(&Operation::DeleteBuild { build }).await?;
        }
        self.come_to_rest().await?;
        let (workloads, of_owners) = self.unsettled();
        self.settle(&workloads).await?;
        self.settle(&of_owners).await?;
        for build in self.of_any(State::latest_of_their_jobs) {
            self.step(&Operation::DeleteBuild { build }).await?;
        }
        self.come_to_rest().await?;
        let of_workers: BTreeSet<_> = self.states.iter().flat_map(State::with_base).collect();
        if !of_workers.is_empty() {
            for worker in of_workers {
                self.step(&Operation::ForgetWorker { worker, force: true }).await?;
            }
            self.come_to_rest().await?;
        }

        // Nothing is kept now, and finally nothing is remembered.
        let seconds = u32::try_from(REMEMBER + 3600).expect("some years");
        self.step(&Operation::Advance { seconds }).await?;
        let mut left = Vec::new();
        for _ in 0..ROUNDS {
            self.step(&Operation::Collect).await?;
            left = self.world.rows_left().await;
            if left.is_empty() {
                return Ok(());
            }
        }
        Err(Violation(format!("nothing is kept, and rows are left: {left:?}")))
    }

    /// Returns the workloads that may be unsettled, and those of them whose builds may own
    /// something.
    fn unsettled(&self) -> (Vec<u16>, Vec<u16>) {
        let all = self.states.iter().map(State::unsettled);
        let (workloads, of_owners): (Vec<_>, Vec<_>) = all.unzip();
        let of_owners: BTreeSet<_> = of_owners.into_iter().flatten().collect();
        let workloads: BTreeSet<_> = workloads.into_iter().flatten().collect();
        (workloads.difference(&of_owners).copied().collect(), of_owners.into_iter().collect())
    }

    /// Returns numbers that hold in any of the states.
    fn of_any(&self, which: impl Fn(&State) -> Vec<u16>) -> BTreeSet<u16> {
        self.states.iter().flat_map(which).collect()
    }

    async fn settle(&mut self, workloads: &[u16]) -> Result<(), Violation> {
        for workload in workloads.iter().copied() {
            let (status, outputs) = (Status::Aborted, Outputs::NoOutput);
            self.step(&Operation::Settle { workload, attempt: 0, status, outputs, build: None }).await?;
        }
        Ok(())
    }

    /// Advances the clock, sweeps and reports until only kept items are left.
    async fn come_to_rest(&mut self) -> Result<(), Violation> {
        let mut rest = Ok(());
        for round in 0..ROUNDS {
            // A few long pauses end all terms. A short pause leaves callers time to renew.
            self.step(&Operation::Advance { seconds: if round < 3 { 900 } else { 25 } }).await?;
            self.step(&Operation::Collect).await?;
            for worker in 0..WORKERS {
                self.step(&Operation::Make { worker }).await?;
                self.step(&Operation::Sweep { worker, destroy: true }).await?;
                self.step(&Operation::BeginReport { worker }).await?;
                self.step(&Operation::Report { worker, which: u8::MAX, way: Delivery::Once }).await?;
            }
            // Purges orphans that were not adopted.
            while self.state().any_orphan(0, false).is_some() {
                self.step(&Operation::PurgeOrphan { which: 0 }).await?;
            }
            self.step(&Operation::Collect).await?;
            let view = self.world.view().await;
            let settled: Vec<_> = self.states.iter().map(|state| check::settled(state, &view)).collect();
            rest = settled[0].clone();
            if settled.iter().any(Result::is_ok) {
                let mut settled = settled.iter();
                self.states.retain(|_| settled.next().is_some_and(Result::is_ok));
                return Ok(());
            }
        }
        rest
    }
}

/// Adds to `possible` the states after concurrent operations, for each order in which the model
/// accepts all answers.
fn in_some_order(
    state: &State,
    answered: &[(&Operation, &Outcome)],
    possible: &mut Vec<State>,
) -> Result<(), Violation> {
    if answered.is_empty() {
        possible.push(state.clone());
        return Ok(());
    }
    let mut judged = Err(Violation("there is no order".to_owned()));
    for first in 0..answered.len() {
        let mut after = state.clone();
        let (operation, outcome) = answered[first];
        let rest = [&answered[..first], &answered[first + 1..]].concat();
        let this = after.accept(operation, outcome).and_then(|()| in_some_order(&after, &rest, possible));
        // One rejection explains enough.
        if judged.is_err() {
            judged = this;
        }
    }
    judged
}

/// Runs one seed. Panics with the shortest failing list of operations that was found.
async fn run_seed(kind: Kind, seed: u64, steps: u64, patience: Duration) {
    let begun = Instant::now();
    eprintln!("{kind:?}: GANTRY_SEED={seed} GANTRY_STEPS={steps}");
    let operations = Generator::generate(seed, usize::try_from(steps).expect("as many as fit"));
    let failure = match Box::pin(run(kind.fresh().await, &operations)).await {
        Err(failure) => failure,
        Ok(skipped) => {
            let (skipped, took) = (skipped.len(), begun.elapsed());
            eprintln!(
                "{kind:?}: nothing was wrong in {took:?}; of {steps} operations {skipped} could not happen"
            );
            return;
        }
    };
    let again = format!(
        "GANTRY_SEED={seed} GANTRY_STEPS={steps} cargo test -p artifact-store --test suite \
         model::{}::random_operations_match_the_model",
        kind.name()
    );
    say(&format!("{kind:?}, {failure}\nrun it again: {again}\nleaving operations out…"));
    let in_the_end = failure.steps == operations.len();
    let mut failing = operations;
    failing.truncate(failure.steps);
    let deadline = Instant::now() + setting("GANTRY_SHRINK").map_or(patience, Duration::from_secs);
    let shrunk = shrink::shrink(failing, deadline, |operations| {
        Box::pin(async move {
            // A failure that depends on timing does not always occur.
            for _ in 0..if operations.iter().any(is_at_once) { 3 } else { 1 } {
                match run(kind.fresh().await, &operations).await {
                    Err(failure) if in_the_end || failure.steps < operations.len() => {
                        return Some(failure.steps);
                    }
                    Err(_) => return Some(operations.len()),
                    Ok(_) => {}
                }
            }
            None
        })
    });
    let shrunk = Box::pin(shrunk).await;
    let last = Box::pin(run(kind.fresh().await, &shrunk)).await.err();
    let last = last.map_or_else(|| "it does not fail each time".to_owned(), |last| last.to_string());
    let code = operations::code(&format!("found_by_seed_{seed}"), &shrunk);
    // The most important part is last, because the end of a long log is read first.
    panic!(
        "{} operations are left, {last}\n\n{code}\n{kind:?}, {failure}\nrun it again: {again}",
        shrunk.len()
    );
}

fn is_at_once(operation: &Operation) -> bool {
    matches!(operation, Operation::Together(_) | Operation::Kill { .. })
}

async fn run_seeds(kind: Kind) {
    let steps = setting("GANTRY_STEPS");
    if let Some(seed) = seeds::repeated() {
        return run_seed(kind, seed, steps.unwrap_or(STEPS), SHRINK).await;
    }
    let begun = Instant::now();
    let seeds = setting("GANTRY_SEEDS").unwrap_or(SEEDS);
    for run in 0..seeds {
        let steps = steps.unwrap_or(if run % LONG == 0 { STEPS } else { FEW_STEPS });
        run_seed(kind, seeds::nth(run), steps, SHRINK).await;
    }
    eprintln!("{kind:?}: {seeds} seeds passed in {:?}", begun.elapsed());
}

/// Runs new seeds until the time is over.
async fn soak_on(kind: Kind) {
    let hours = std::env::var("GANTRY_SOAK").map_or(1.0, |hours| hours.parse().expect("hours"));
    let deadline = Instant::now() + Duration::from_secs_f64(hours * 3600.0);
    let steps = setting("GANTRY_STEPS").unwrap_or(STEPS);
    for run in 0.. {
        if Instant::now() >= deadline {
            return;
        }
        run_seed(kind, seeds::nth(run), steps, SHRINK_IN_A_SOAK).await;
    }
}

mod sqlite {
    use super::{Kind, run_seeds, soak_on};

    #[tokio::test(flavor = "multi_thread")]
    async fn random_operations_match_the_model() {
        run_seeds(Kind::Sqlite).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "runs for hours: make soak"]
    async fn soak() {
        soak_on(Kind::Sqlite).await;
    }
}

mod postgres {
    use super::{Kind, run_seeds, soak_on};

    #[tokio::test(flavor = "multi_thread")]
    async fn random_operations_match_the_model() {
        run_seeds(Kind::Postgres).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "runs for hours: make soak"]
    async fn soak() {
        soak_on(Kind::Postgres).await;
    }
}
