//! Reads the rows of workers that a notification named, many with one statement.

use std::collections::HashSet;
use std::time::Instant;

use domain::WorkerId;

use crate::context::Context;
use crate::workers;

/// Reads what was changed, until the service stops.
pub(crate) async fn read_forever(context: Context) {
    let states = &context.notify.desired;
    let read = async {
        loop {
            let asked = states.next_asked().await;
            let rows = match workers::find_all(context.db.read(), asked.keys().copied()).await {
                Ok(rows) => rows,
                Err(error) => {
                    // The scheduling task polls as well.
                    tracing::debug!(error = %error, "cannot read workers that were changed");
                    continue;
                }
            };
            for row in &rows {
                let since = asked.get(&WorkerId::from_uuid(row.id)).copied();
                states.note(std::slice::from_ref(row), since.unwrap_or_else(Instant::now));
            }
            let there: HashSet<_> = rows.iter().map(|row| WorkerId::from_uuid(row.id)).collect();
            states.forget(asked.into_keys().filter(|id| !there.contains(id)));
        }
    };
    tokio::select! {
        () = context.stopping.cancelled() => {}
        () = read => {}
    }
}
