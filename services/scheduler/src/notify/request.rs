//! Calls between tasks through a channel, with an answer.
//!
//! Invariant: no caller waits for a task that has ended. A request that is sent while the receiver
//! is dropped may stay in the channel as long as senders exist. A caller therefore also waits for
//! the receiver to close.

use tokio::sync::{mpsc, oneshot};

/// Sends a request with its reply channel, and waits for the answer. Returns `None` if the receiver
/// has ended.
pub(crate) async fn call<R, T>(
    requests: &mpsc::Sender<R>,
    request: impl FnOnce(oneshot::Sender<T>) -> R,
) -> Option<T> {
    let (answer, mut answered) = oneshot::channel();
    requests.send(request(answer)).await.ok()?;
    tokio::select! {
        biased;
        answer = &mut answered => answer.ok(),
        // The answer may have been sent just before.
        () = requests.closed() => answered.try_recv().ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::hint::spin_loop;
    use std::time::Duration;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn call_ends_when_receiver_is_dropped() {
        let all_calls = async {
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
        tokio::time::timeout(Duration::from_secs(120), all_calls).await.expect("no call waits forever");
    }

    #[tokio::test]
    async fn answer_arrives_after_receiver_is_dropped() {
        let (requests, mut receiver) = mpsc::channel::<oneshot::Sender<u8>>(16);
        let answers = async {
            let answer = receiver.recv().await.expect("a request");
            answer.send(7).expect("a waiting caller");
            drop(receiver);
        };
        let (answered, ()) = tokio::join!(call(&requests, |answer| answer), answers);
        assert_eq!(answered, Some(7));
        assert_eq!(call(&requests, |answer| answer).await, None);
    }
}
