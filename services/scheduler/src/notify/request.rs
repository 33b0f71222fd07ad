//! Calls from one task to another, through a queue: each is answered, or it is known that nobody answers any more.
//!
//! Invariant: nobody waits for a task that has gone. What is sent in the moment in which the receiver goes may stay in the channel, and what
//! would say so with it, for as long as anybody may send: so whoever waits looks whether the receiver is there as well.

use tokio::sync::{mpsc, oneshot};

/// Sends a request with the way to answer it, and waits for the answer. `None`: nobody answers any more.
pub(crate) async fn call<R, T>(
    requests: &mpsc::Sender<R>,
    request: impl FnOnce(oneshot::Sender<T>) -> R,
) -> Option<T> {
    let (answer, mut answered) = oneshot::channel();
    requests.send(request(answer)).await.ok()?;
    tokio::select! {
        biased;
        answer = &mut answered => answer.ok(),
        // It may have been answered just before.
        () = requests.closed() => answered.try_recv().ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::hint::spin_loop;
    use std::time::Duration;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn nobody_waits_for_a_task_that_has_gone() {
        let everyone = async {
            for number in 0..30_000 {
                let (requests, receiver) = mpsc::channel::<oneshot::Sender<()>>(16);
                let mut calls = tokio::task::JoinSet::new();
                calls.spawn(async move {
                    (0..number % 50).for_each(|_| spin_loop());
                    call(&requests, |answer| answer).await
                });
                (0..number % 997).for_each(|_| spin_loop());
                drop(receiver);
                let called = calls.join_next().await.expect("one call");
                assert_eq!(called.expect("no panic"), None);
            }
        };
        tokio::time::timeout(Duration::from_secs(120), everyone).await.expect("nobody waits for ever");
    }

    #[tokio::test]
    async fn what_was_answered_by_one_that_has_gone_is_heard() {
        let (requests, mut receiver) = mpsc::channel::<oneshot::Sender<u8>>(16);
        let answers = async {
            let answer = receiver.recv().await.expect("a request");
            answer.send(7).expect("somebody waits");
            drop(receiver);
        };
        let (answered, ()) = tokio::join!(call(&requests, |answer| answer), answers);
        assert_eq!(answered, Some(7));
        assert_eq!(call(&requests, |answer| answer).await, None);
    }
}
