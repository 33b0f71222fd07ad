//! `gantry attach` and `gantry logs`: the output of a workload that somebody submitted.

use anyhow::bail;
use rpc::pb::scheduler::{StdinMode, Workload, WorkloadState};

use crate::args::{AttachArgs, WorkloadArgs};
use crate::connect::Connection;
use crate::follow::{Follow, OnSignal};
use crate::json as shown;
use crate::list::workload;
use crate::signals::Signals;
use crate::stdin;
use crate::ui::Ui;

/// `gantry attach`. Answers the exit code.
pub(crate) async fn attach_to(args: &AttachArgs, connection: &Connection, ui: &Ui) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    let id = args.workload.to_string();
    let Workload { spec, state, .. } = workload(connection, &id).await?;
    let takes_input = spec.is_some_and(|spec| spec.stdin() == StdinMode::Attached);
    let lives = state != i32::from(WorkloadState::Finished);
    let follow = Follow {
        connection,
        ui,
        workload: id,
        on_signal: OnSignal::Leave,
        narrate: lives,
        stdin: takes_input && lives && !args.no_stdin && stdin::is_readable(),
        acknowledge: true,
    };
    let followed = follow.run(&mut signals).await?;
    let code = crate::run::end(ui, &followed, &Ok(()));
    ui.event("finished", shown::finished(&followed.finished, code));
    Ok(code)
}

/// `gantry logs`: all output that is still kept, and what comes, until there is no more.
pub(crate) async fn logs(args: &WorkloadArgs, connection: &Connection, ui: &Ui) -> anyhow::Result<()> {
    let mut signals = Signals::catch()?;
    let follow = Follow {
        connection,
        ui,
        workload: args.workload.to_string(),
        on_signal: OnSignal::Leave,
        narrate: false,
        stdin: false,
        // Whoever the process waits for acknowledges; reading along changes nothing.
        acknowledge: false,
    };
    let followed = follow.run(&mut signals).await?;
    if let (None, Some(failure)) = (&followed.finished.exit, &followed.finished.failure) {
        ui.note(&format!("its process did not run: {} ({})", failure.message, failure.reason));
    }
    if followed.output_lost {
        bail!("the output is not whole");
    }
    ui.event("finished", shown::finished(&followed.finished, 0));
    Ok(())
}
