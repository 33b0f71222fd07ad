//! The task that reads the rows of workers named by notifications, many with one statement.

use std::collections::HashSet;
use std::time::Instant;

use domain::WorkerId;

use crate::context::Context;
use crate::workers;

/// Reads changed workers until the service stops.
pub(crate) async fn read_forever(context: Context) {
    let states = &context.notify.desired;
    let read = async {
        loop {
            let requested = states.next_requested().await;
            let rows = match workers::find_all(context.db.read(), requested.keys().copied()).await {
                Ok(rows) => rows,
                Err(error) => {
                    // The scheduling task polls as well, so a missed read only causes a delay.
                    tracing::debug!(error = %error, "cannot read changed workers");
                    continue;
                }
            };
            for row in &rows {
                let since = requested.get(&WorkerId::from_uuid(row.id)).copied();
                states.note(std::slice::from_ref(row), since.unwrap_or_else(Instant::now));
            }
            let there: HashSet<_> = rows.iter().map(|row| WorkerId::from_uuid(row.id)).collect();
            states.forget(requested.into_keys().filter(|id| !there.contains(id)));
        }
    };
    tokio::select! {
        () = context.stopping.cancelled() => {}
        () = read => {}
    }
}
