//! Batches of calls that share one transaction.
//!
//! A [`Batcher`] starts a batch with the first call. Calls that arrive meanwhile wait, and form the
//! next batch. Under load, one commit and its statements serve many calls. Without load, a call
//! does not wait.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sea_orm::DbErr;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

/// Time after which a batch counts as slow, and the next batch starts beside it. One batch at a
/// time is the fastest, but a batch that waits for a lock must not block the others.
const SLOW_AFTER: Duration = Duration::from_millis(50);

/// Maximum number of batches that run at the same time.
const MAX_CONCURRENT_BATCHES: usize = 8;

type BatchFuture = Pin<Box<dyn Future<Output = ()> + Send>>;
type RunBatch<C, R> = dyn Fn(Vec<BatchedCall<C, R>>) -> BatchFuture + Send + Sync;

/// A call, and the channel for its reply.
pub type BatchedCall<C, R> = (C, oneshot::Sender<R>);

/// Channels for the replies, in the order of the calls.
pub type ReplySenders<R> = Vec<oneshot::Sender<R>>;

/// Groups calls by `key`. The groups are sorted by key. The calls of a group keep their order.
pub fn group_calls<K: Ord, C, R>(
    calls: Vec<BatchedCall<C, R>>,
    key: impl Fn(&C) -> K,
) -> Vec<(Vec<C>, ReplySenders<R>)> {
    let mut groups = BTreeMap::<K, (Vec<C>, ReplySenders<R>)>::new();
    for (call, reply) in calls {
        let (group, replies) = groups.entry(key(&call)).or_default();
        group.push(call);
        replies.push(reply);
    }
    groups.into_values().collect()
}

/// Runs calls in batches. Cheap to clone; all clones share one queue.
///
/// The queue is unbounded. It keeps a call only while its caller waits for the reply.
pub struct Batcher<C, R>(Arc<Inner<C, R>>);

struct Inner<C, R> {
    max_calls: usize,
    slow_after: Duration,
    run_batch: Box<RunBatch<C, R>>,
    tasks: TaskTracker,
    state: Mutex<State<C, R>>,
}

struct State<C, R> {
    waiting: Vec<BatchedCall<C, R>>,
    /// Number of running batches.
    running: usize,
    /// Number of running batches that take longer than `slow_after`.
    slow: usize,
}

impl<C, R> State<C, R> {
    /// Whether another batch must start. If so, `running` counts it already.
    fn should_start(&mut self) -> bool {
        let should_start =
            self.running == self.slow && self.running < MAX_CONCURRENT_BATCHES && !self.waiting.is_empty();
        self.running += usize::from(should_start);
        should_start
    }
}

/// The batch of a call panicked, or ended without a reply to the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("cannot complete the call: its batch ended without a reply")]
pub struct BatchLost;

/// Callers handle a lost batch like an error of the database. The call may be repeated.
impl From<BatchLost> for DbErr {
    fn from(lost: BatchLost) -> Self {
        Self::Custom(lost.to_string())
    }
}

impl<C, R> Clone for Batcher<C, R> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C, R> fmt::Debug for Batcher<C, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher").field("max_calls", &self.0.max_calls).finish_non_exhaustive()
    }
}

impl<C: Send + 'static, R: Send + 'static> Batcher<C, R> {
    /// Creates a batcher that passes at most `max_calls` calls at once to `run_batch`, in tasks of
    /// `tasks`. `run_batch` must send a reply to each call.
    pub fn new<F>(
        max_calls: usize,
        tasks: TaskTracker,
        run_batch: impl Fn(Vec<BatchedCall<C, R>>) -> F + Send + Sync + 'static,
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
        run_batch: impl Fn(Vec<BatchedCall<C, R>>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let run_batch = Box::new(move |calls| Box::pin(run_batch(calls)) as BatchFuture);
        let state = Mutex::new(State { waiting: Vec::new(), running: 0, slow: 0 });
        Self(Arc::new(Inner { max_calls, slow_after, run_batch, tasks, state }))
    }

    /// Runs `call` in a batch, and returns its reply. A call of a started batch runs even if its
    /// caller is dropped. A call whose caller is dropped earlier is discarded.
    pub async fn call(&self, call: C) -> Result<R, BatchLost> {
        let (sender, reply) = oneshot::channel();
        self.update(|state| state.waiting.push((call, sender)));
        reply.await.map_err(|_| BatchLost)
    }

    /// Changes the state, and starts to run batches if necessary.
    fn update(&self, change: impl FnOnce(&mut State<C, R>)) {
        let should_start = {
            let mut state = self.0.state();
            change(&mut state);
            state.should_start()
        };
        if should_start {
            self.0.tasks.spawn(self.clone().run_batches());
        }
    }

    /// Runs batches until no call waits.
    async fn run_batches(self) {
        while let Some(calls) = self.0.take_batch() {
            let inner = self.0.clone();
            // A panic ends only the separate task of its batch.
            let mut batch = self.0.tasks.spawn(async move { (inner.run_batch)(calls).await });
            if tokio::time::timeout(self.0.slow_after, &mut batch).await.is_err() {
                self.update(|state| state.slow += 1);
                // After a panic, the callers receive `BatchLost` from their channels.
                batch.await.ok();
                self.0.state().slow -= 1;
            }
        }
    }
}

impl<C, R> Inner<C, R> {
    /// Takes the calls of the next batch, the oldest first. `None`: no call waits, or another task
    /// runs the batches. The caller then must stop, and `running` does not count it any more.
    fn take_batch(&self) -> Option<Vec<BatchedCall<C, R>>> {
        let mut state = self.state();
        state.waiting.retain(|(_, reply)| !reply.is_closed());
        let count = state.waiting.len().min(self.max_calls);
        // Other running batches that are not slow.
        let others = state.running - state.slow - 1;
        if count == 0 || others > 0 {
            state.running -= 1;
            return None;
        }
        Some(state.waiting.drain(..count).collect())
    }

    fn state(&self) -> MutexGuard<'_, State<C, R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;

    use super::*;

    /// Number of calls of each batch.
    type Sizes = Arc<Mutex<Vec<usize>>>;

    /// A batcher that doubles numbers. Each batch takes a permit of the gate. The call 13 panics.
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
                    sizes.lock().expect("the lock is not poisoned").push(calls.len());
                    gate.acquire().await.expect("the gate is open").forget();
                    for (n, reply) in calls {
                        assert_ne!(n, 13, "a batch with 13 panics");
                        reply.send(n * 2).ok();
                    }
                }
            },
        );
        (batcher, gate, sizes)
    }

    async fn wait_for_batches(sizes: &Mutex<Vec<usize>>, count: usize) {
        while sizes.lock().expect("the lock is not poisoned").len() < count {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn calls_during_a_batch_share_the_next() {
        let (batcher, gate, sizes) = doubling(Duration::from_secs(3600));
        let spawned = TaskTracker::new();
        let call = |n| {
            let batcher = batcher.clone();
            spawned.spawn(async move { batcher.call(n).await })
        };
        let mut callers = vec![call(0)];
        wait_for_batches(&sizes, 1).await;
        // One batch is running. One of the next callers is dropped.
        let dropped = call(100);
        callers.extend((1..8).map(call));
        while batcher.0.state().waiting.len() < 8 {
            tokio::task::yield_now().await;
        }
        dropped.abort();
        assert!(dropped.await.expect_err("the caller was aborted").is_cancelled());
        gate.add_permits(100);
        for (n, caller) in (0..).zip(callers) {
            assert_eq!(caller.await.expect("the caller does not panic"), Ok(n * 2));
        }
        assert_eq!(*sizes.lock().expect("the lock is not poisoned"), [1, 5, 2]);

        assert_eq!(batcher.call(13).await, Err(BatchLost));
        assert_eq!(batcher.call(14).await, Ok(28), "the next batch is unaffected");
    }

    #[tokio::test]
    async fn slow_batch_does_not_block_others() {
        let (batcher, gate, sizes) = doubling(Duration::ZERO);
        let spawned = TaskTracker::new();
        let call = |n| {
            let batcher = batcher.clone();
            spawned.spawn(async move { batcher.call(n).await })
        };
        let mut callers = Vec::new();
        for n in 0..MAX_CONCURRENT_BATCHES {
            callers.push(call(u32::try_from(n).expect("few")));
            wait_for_batches(&sizes, n + 1).await;
        }
        callers.push(call(8));
        callers.push(call(9));
        while batcher.0.state().waiting.len() < 2 {
            tokio::task::yield_now().await;
        }
        gate.add_permits(100);
        for (n, caller) in (0..).zip(callers) {
            assert_eq!(caller.await.expect("the caller does not panic"), Ok(n * 2));
        }
        assert_eq!(
            sizes.lock().expect("the lock is not poisoned")[MAX_CONCURRENT_BATCHES..],
            [2],
            "the number of concurrent batches is limited"
        );
        // A batch that is no longer slow ends if another one is running.
        while batcher.0.state().running > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(batcher.0.state().slow, 0);
    }
}
