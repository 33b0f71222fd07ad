//! The streamer as a separate process.

use std::process::ExitCode;

use clap::Parser;
use server::{Host, ListenArgs, StartContext};
use streamer::Config;

/// The streamer of Gantry: plans uploads, downloads and copies of artifacts.
#[derive(Debug, Parser)]
#[command(name = "streamer", version)]
struct Arguments {
    #[command(flatten)]
    listen: ListenArgs,
    #[command(flatten)]
    config: Config,
}

fn main() -> ExitCode {
    server::run::<Arguments>()
}

impl server::Program for Arguments {
    const NAME: &'static str = "streamer";

    fn listen(&self) -> &ListenArgs {
        &self.listen
    }

    fn check(&self) -> anyhow::Result<()> {
        Ok(())
    }

    async fn start(self, context: StartContext, host: &mut Host) -> anyhow::Result<()> {
        streamer::start(&Config { token: context.token, ..self.config }, host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_listed() {
        assert_eq!(server::settings::unlisted_variables(&server::command::<Arguments>()), [] as [String; 0]);
    }
}
