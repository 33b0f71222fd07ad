//! The queue between the walk and its readers.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::read::Task;

/// Maximum number of batches in the queue.
const QUEUE_BATCHES: usize = 16;

/// A bounded queue of batches for the readers. It ends when it is closed and empty, and no reader
/// works on a batch that could add another one.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    room: Condvar,
}

#[derive(Default)]
struct QueueState {
    batches: VecDeque<Vec<Task>>,
    /// Number of batches in progress.
    taken: usize,
    closed: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a batch. Waits while the queue is full and open.
    pub(super) fn push(&self, batch: Vec<Task>) {
        let mut state = self.lock();
        while state.batches.len() >= QUEUE_BATCHES && !state.closed {
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.batches.push_back(batch);
        drop(state);
        self.changed.notify_one();
    }

    /// Adds a batch before all others, even to a full queue. Readers call this, and must not wait
    /// for other readers.
    pub(super) fn push_urgent(&self, batch: Vec<Task>) {
        self.lock().batches.push_front(batch);
        self.changed.notify_one();
    }

    pub(super) fn pop(&self) -> Option<Vec<Task>> {
        let mut state = self.lock();
        loop {
            if let Some(batch) = state.batches.pop_front() {
                state.taken += 1;
                drop(state);
                self.room.notify_one();
                return Some(batch);
            }
            if state.closed && state.taken == 0 {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn done(&self) {
        let mut state = self.lock();
        state.taken -= 1;
        let over = state.closed && state.taken == 0;
        drop(state);
        if over {
            self.changed.notify_all();
        }
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
        self.room.notify_all();
    }
}

/// Closes the queue at the end of the walk, so that the readers end.
pub(super) struct CloseOnDrop<'a>(pub(super) &'a Queue);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Marks a batch as done. If the reader panics, closes the queue, so that no other thread waits for
/// that reader.
pub(super) struct DoneOnDrop<'a>(pub(super) &'a Queue);

impl Drop for DoneOnDrop<'_> {
    fn drop(&mut self) {
        self.0.done();
        if thread::panicking() {
            self.0.close();
        }
    }
}
