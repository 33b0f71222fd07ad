//! Calls that are carried out together: those that come while others are carried out wait, and are then one transaction. So a commit, and each of
//! its statements, is for many where many call at once, and nobody waits where few do.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sea_orm::DbErr;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

/// For how long others wait for those that are carried out before they are carried out beside them: one transaction at a time is the fastest, and
/// one that waits for somebody's lock shall not hold up everybody.
const SLOW_AFTER: Duration = Duration::from_millis(50);

/// How many times calls are carried out at the same time at max_calls.
const MAX_CONCURRENT_BATCHES: usize = 8;

type BatchFuture = Pin<Box<dyn Future<Output = ()> + Send>>;
type RunBatch<C, A> = dyn Fn(Vec<BatchedCall<C, A>>) -> BatchFuture + Send + Sync;

/// A call, and where its answer goes.
pub type BatchedCall<C, A> = (C, oneshot::Sender<A>);

/// Where answers go, in the order of the calls.
pub type ReplySenders<A> = Vec<oneshot::Sender<A>>;

/// Calls by what `key` says of them, by which they are sorted; those of one key are in the order in which they came.
pub fn group_calls<K: Ord, C, A>(
    calls: Vec<BatchedCall<C, A>>,
    key: impl Fn(&C) -> K,
) -> Vec<(Vec<C>, ReplySenders<A>)> {
    let mut groups = BTreeMap::<K, (Vec<C>, ReplySenders<A>)>::new();
    for (call, answer) in calls {
        let (group, answers) = groups.entry(key(&call)).or_default();
        group.push(call);
        answers.push(answer);
    }
    groups.into_values().collect()
}

/// Where calls are handed in. As many wait as callers do: each is kept as long as somebody waits for its answer. Cheap to clone; clones share it.
pub struct Batcher<C, A>(Arc<Inner<C, A>>);

struct Inner<C, A> {
    max_calls: usize,
    slow_after: Duration,
    run_batch: Box<RunBatch<C, A>>,
    tasks: TaskTracker,
    state: Mutex<State<C, A>>,
}

struct State<C, A> {
    waiting: Vec<BatchedCall<C, A>>,
    running: usize,
    /// How many of those take longer than others wait for.
    slow: usize,
}

impl<C, A> State<C, A> {
    /// Whether another one is to be under way. It counts already.
    fn should_start(&mut self) -> bool {
        let should_start =
            self.running == self.slow && self.running < MAX_CONCURRENT_BATCHES && !self.waiting.is_empty();
        self.running += usize::from(should_start);
        should_start
    }
}

/// A call was not carried out to its end: that panicked, and has said how. It is told to all that were carried out together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("what was asked for was not carried out to its end")]
pub struct BatchLost;

/// As what the database fails with: it is safe to repeat.
impl From<BatchLost> for DbErr {
    fn from(broken: BatchLost) -> Self {
        Self::Custom(broken.to_string())
    }
}

impl<C, A> Clone for Batcher<C, A> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C, A> fmt::Debug for Batcher<C, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher").field("max_calls", &self.0.max_calls).finish_non_exhaustive()
    }
}

impl<C: Send + 'static, A: Send + 'static> Batcher<C, A> {
    /// Has calls carried out by `run_batch`, at max_calls so many at once, in tasks among `tasks`. It answers each of them as soon as it can.
    pub fn new<F>(
        max_calls: usize,
        tasks: TaskTracker,
        run_batch: impl Fn(Vec<BatchedCall<C, A>>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        Self::with_slow_after(SLOW_AFTER, max_calls, tasks, run_batch)
    }

    fn with_slow_after<F>(
        slow_after: Duration,
        max_calls: usize,
        tasks: TaskTracker,
        run_batch: impl Fn(Vec<BatchedCall<C, A>>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let run_batch = Box::new(move |calls| Box::pin(run_batch(calls)) as BatchFuture);
        let state = Mutex::new(State { waiting: Vec::new(), running: 0, slow: 0 });
        Self(Arc::new(Inner { max_calls, slow_after, run_batch, tasks, state }))
    }

    /// Has it carried out with others, and answers what became of it. What is under way is carried out whatever becomes of whoever asked; who has
    /// given up before asks again if he still wants it.
    pub async fn call(&self, call: C) -> Result<A, BatchLost> {
        let (answer, answered) = oneshot::channel();
        self.update(|state| state.waiting.push((call, answer)));
        answered.await.map_err(|_| BatchLost)
    }

    /// Changes what is under way and what waits, and should_start to carry that out where it is time.
    fn update(&self, change: impl FnOnce(&mut State<C, A>)) {
        let should_start = {
            let mut state = self.0.state();
            change(&mut state);
            state.should_start()
        };
        if should_start {
            self.0.tasks.spawn(self.clone().run_batches());
        }
    }

    /// Carries out what waits, until nothing does.
    async fn run_batches(self) {
        while let Some(calls) = self.0.take_batch() {
            let inner = self.0.clone();
            // A task of its own, so that others are carried out when it panics.
            let mut batch = self.0.tasks.spawn(async move { (inner.run_batch)(calls).await });
            if tokio::time::timeout(self.0.slow_after, &mut batch).await.is_err() {
                self.update(|state| state.slow += 1);
                // Whoever asked hears by himself when it panics.
                batch.await.ok();
                self.0.state().slow -= 1;
            }
        }
    }
}

impl<C, A> Inner<C, A> {
    /// Calls that wait, the first first. `None`: none does, or another one takes them, and one less is under way.
    fn take_batch(&self) -> Option<Vec<BatchedCall<C, A>>> {
        let mut state = self.state();
        state.waiting.retain(|(_, answer)| !answer.is_closed());
        let count = state.waiting.len().min(self.max_calls);
        // Besides this one, and those that are slow.
        let others = state.running - state.slow - 1;
        if count == 0 || others > 0 {
            state.running -= 1;
            return None;
        }
        Some(state.waiting.drain(..count).collect())
    }

    fn state(&self) -> MutexGuard<'_, State<C, A>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;

    use super::*;

    /// How many calls went together.
    type Sizes = Arc<Mutex<Vec<usize>>>;

    /// Doubles, as the gate lets it. 13 breaks.
    fn doubling(slow_after: Duration) -> (Batcher<u32, u32>, Arc<Semaphore>, Sizes) {
        let (gate, sizes) = (Arc::new(Semaphore::new(0)), Arc::new(Mutex::new(Vec::new())));
        let (at_gate, seen) = (gate.clone(), sizes.clone());
        let batcher = Batcher::with_slow_after(
            slow_after,
            5,
            TaskTracker::new(),
            move |calls: Vec<BatchedCall<u32, u32>>| {
                let (gate, sizes) = (at_gate.clone(), seen.clone());
                async move {
                    sizes.lock().expect("nobody panics").push(calls.len());
                    gate.acquire().await.expect("it is open").forget();
                    for (n, answer) in calls {
                        assert_ne!(n, 13, "this one breaks");
                        answer.send(n * 2).ok();
                    }
                }
            },
        );
        (batcher, gate, sizes)
    }

    async fn running(sizes: &Mutex<Vec<usize>>, count: usize) {
        while sizes.lock().expect("nobody panics").len() < count {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn who_comes_meanwhile_goes_together() {
        let (batcher, gate, sizes) = doubling(Duration::from_secs(3600));
        let spawned = TaskTracker::new();
        let call = |n| {
            let batcher = batcher.clone();
            spawned.spawn(async move { batcher.call(n).await })
        };
        let mut asked = vec![call(0)];
        running(&sizes, 1).await;
        // One is under way. Of those who come now one gives up.
        let gives_up = call(100);
        asked.extend((1..8).map(call));
        while batcher.0.state().waiting.len() < 8 {
            tokio::task::yield_now().await;
        }
        gives_up.abort();
        assert!(gives_up.await.expect_err("it was aborted").is_cancelled());
        gate.add_permits(100);
        for (n, asked) in (0..).zip(asked) {
            assert_eq!(asked.await.expect("it is answered"), Ok(n * 2));
        }
        assert_eq!(*sizes.lock().expect("nobody panics"), [1, 5, 2]);

        assert_eq!(batcher.call(13).await, Err(BatchLost));
        assert_eq!(batcher.call(14).await, Ok(28), "others are not concerned");
    }

    #[tokio::test]
    async fn nobody_waits_for_what_takes_long() {
        let (batcher, gate, sizes) = doubling(Duration::ZERO);
        let spawned = TaskTracker::new();
        let call = |n| {
            let batcher = batcher.clone();
            spawned.spawn(async move { batcher.call(n).await })
        };
        let mut asked = Vec::new();
        for n in 0..MAX_CONCURRENT_BATCHES {
            asked.push(call(u32::try_from(n).expect("few")));
            running(&sizes, n + 1).await;
        }
        asked.push(call(8));
        asked.push(call(9));
        while batcher.0.state().waiting.len() < 2 {
            tokio::task::yield_now().await;
        }
        gate.add_permits(100);
        for (n, asked) in (0..).zip(asked) {
            assert_eq!(asked.await.expect("it is answered"), Ok(n * 2));
        }
        assert_eq!(sizes.lock().expect("nobody panics")[MAX_CONCURRENT_BATCHES..], [2], "no more at a time");
        // Whoever is slow no more goes where another is under way.
        while batcher.0.state().running > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(batcher.0.state().slow, 0);
    }
}
