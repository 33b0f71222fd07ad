//! Reduction of a failing list of operations until every operation is needed.

use std::time::Instant;

use super::operations::Operation;

/// Returns the shortest failing list found before `deadline`. `fails` returns the number of
/// operations until the list fails, if it does.
pub(crate) async fn shrink<F>(
    mut operations: Vec<Operation>,
    deadline: Instant,
    fails: impl Fn(Vec<Operation>) -> F,
) -> Vec<Operation>
where
    F: Future<Output = Option<usize>>,
{
    let mut chunk = operations.len().div_ceil(2).max(1);
    loop {
        let mut found = false;
        let mut at = 0;
        while at < operations.len() && Instant::now() < deadline {
            let end = (at + chunk).min(operations.len());
            let mut fewer = operations.clone();
            fewer.drain(at..end);
            match fails(fewer.clone()).await {
                Some(needed) => {
                    fewer.truncate(needed);
                    operations = fewer;
                    found = true;
                }
                None => at = end,
            }
        }
        if Instant::now() >= deadline {
            return operations;
        }
        match chunk {
            1 if !found => break,
            1 => {}
            _ => chunk = chunk.div_ceil(2),
        }
    }
    for at in 0..operations.len() {
        alone(&mut operations, at, deadline, &fails).await;
    }
    operations
}

/// Removes parts of concurrent operations.
async fn alone<F>(
    operations: &mut [Operation],
    at: usize,
    deadline: Instant,
    fails: &impl Fn(Vec<Operation>) -> F,
) where
    F: Future<Output = Option<usize>>,
{
    let mut part = 0;
    while let Some(Operation::Together(parts)) = operations.get(at)
        && part < parts.len()
        && parts.len() > 1
        && Instant::now() < deadline
    {
        let mut fewer = parts.clone();
        fewer.remove(part);
        let mut candidate = operations.to_vec();
        candidate[at] = match fewer.as_slice() {
            [one] => one.clone(),
            _ => Operation::Together(fewer),
        };
        if fails(candidate.clone()).await.is_some() {
            operations[at] = candidate.swap_remove(at);
        } else {
            part += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn shrunk_list_needs_every_operation() {
        let mut operations: Vec<_> = (0..300).map(|worker| Operation::Advance { seconds: worker }).collect();
        let parts = vec![Operation::Collect, Operation::DeleteBuild { build: 3 }, Operation::Collect];
        operations.insert(211, Operation::Together(parts));
        // The failure needs two of them in this order, and the deletion of a build afterwards.
        let fails = |operations: Vec<Operation>| async move {
            let first = operations.iter().position(|it| *it == Operation::Advance { seconds: 17 })?;
            let second = operations.iter().position(|it| *it == Operation::Advance { seconds: 200 })?;
            let deletes = |it: &Operation| format!("{it:?}").contains("DeleteBuild");
            let third = operations.iter().position(deletes)?;
            (first < second && second < third).then_some(third + 1)
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        let shrunk = shrink(operations, deadline, fails).await;
        let expected = [
            Operation::Advance { seconds: 17 },
            Operation::Advance { seconds: 200 },
            Operation::DeleteBuild { build: 3 },
        ];
        assert_eq!(shrunk, expected);
    }
}
