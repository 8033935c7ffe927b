//! Arguments of the commands, and what each command writes about itself: a man page, completions.

use crate::output;
use clap::{Arg, ArgMatches, Command, Parser, ValueEnum, value_parser};
use clap_complete::Shell;
use clap_mangen::Man;
use std::ffi::OsString;
use std::io;
use std::process::ExitCode;

/// A page that a command can write about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Page {
    /// The man page
    Man,
    /// Completions of bash
    CompleteBash,
    /// Completions of elvish
    CompleteElvish,
    /// Completions of fish
    CompleteFish,
    /// Completions of PowerShell
    CompletePowershell,
    /// Completions of zsh
    CompleteZsh,
}

const GENERATE: &str = "generate-page";

/// Reads this process's arguments and does the command, or writes one of its pages.
pub fn run<A: Parser>(command: impl FnOnce(A) -> ExitCode) -> ExitCode {
    run_from(std::env::args_os(), command)
}

/// The same with arguments from elsewhere, the program's name first.
pub fn run_from<A: Parser>(
    args: impl IntoIterator<Item = OsString>,
    command: impl FnOnce(A) -> ExitCode,
) -> ExitCode {
    let mut known = with_pages(A::command());
    let mut matches = match known.try_get_matches_from_mut(args) {
        Ok(matches) => matches,
        Err(e) => e.exit(),
    };
    if let Some(page) = asked(&mut matches) {
        return match written(page, known) {
            Ok(text) => output::show(&text),
            Err(e) => output::ended(Err(e)),
        };
    }
    match A::from_arg_matches(&matches) {
        Ok(args) => command(args),
        Err(e) => e.format(&mut known).exit(),
    }
}

/// The command with the option for its pages, which wants no other argument.
fn with_pages(command: Command) -> Command {
    let pages = Arg::new(GENERATE)
        .long(GENERATE)
        .value_name("PAGE")
        .value_parser(value_parser!(Page))
        .exclusive(true)
        .help("Writes the command's man page or a shell's completions, and ends");
    // Clap asks for a subcommand before it looks at what excludes one.
    command.subcommand_required(false).arg(pages)
}

fn asked(matches: &mut ArgMatches) -> Option<Page> {
    matches.remove_one(GENERATE)
}

fn written(page: Page, mut command: Command) -> io::Result<String> {
    let shell = match page {
        Page::Man => return manual(&command),
        Page::CompleteBash => Shell::Bash,
        Page::CompleteElvish => Shell::Elvish,
        Page::CompleteFish => Shell::Fish,
        Page::CompletePowershell => Shell::PowerShell,
        Page::CompleteZsh => Shell::Zsh,
    };
    let name = command.get_name().to_string();
    let mut text = vec![];
    clap_complete::generate(shell, &mut command, name, &mut text);
    String::from_utf8(text).map_err(io::Error::other)
}

/// The command's page, then one for each of its subcommands.
fn manual(command: &Command) -> io::Result<String> {
    let mut text = vec![];
    let top = command.clone().disable_help_subcommand(true);
    Man::new(top).render(&mut text)?;
    for part in command.get_subcommands().filter(|part| part.get_name() != "help") {
        let name = format!("{}-{}", command.get_name(), part.get_name());
        Man::new(part.clone().display_name(&name)).title(name).render(&mut text)?;
    }
    String::from_utf8(text).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ConvertArgs, DataArgs, DoctorArgs, EvalArgs, GenerateArgs, ReportArgs, SweepArgs, TrainArgs,
    };

    fn commands() -> Vec<Command> {
        use clap::CommandFactory;
        vec![
            ConvertArgs::command(),
            DataArgs::command(),
            DoctorArgs::command(),
            EvalArgs::command(),
            GenerateArgs::command(),
            ReportArgs::command(),
            SweepArgs::command(),
            TrainArgs::command(),
        ]
    }

    #[test]
    fn every_command_has_a_name_and_every_page_tells_of_its_options() {
        let mut names = vec![];
        for command in commands() {
            with_pages(command.clone()).debug_assert();
            names.push(command.get_name().to_string());
            let options: Vec<String> = command
                .get_arguments()
                .chain(command.get_subcommands().flat_map(Command::get_arguments))
                .filter_map(|arg| arg.get_long().map(String::from))
                .collect();
            for page in Page::value_variants() {
                let text = written(*page, with_pages(command.clone())).expect("it is written");
                let plain = text.replace('\\', "");
                for option in &options {
                    assert!(plain.contains(option), "{page:?} of {}: {option}", names.concat());
                }
            }
        }
        let all = ["convert", "data", "doctor", "eval", "generate", "report", "sweep", "train"];
        assert_eq!(names, all);
    }

    #[test]
    fn a_page_is_asked_for_alone() {
        let asks = |args: &[&str]| {
            let args = [&["train"], args].concat();
            let mut known = with_pages(<TrainArgs as clap::CommandFactory>::command());
            known.try_get_matches_from_mut(args).map(|mut matches| asked(&mut matches))
        };
        assert_eq!(asks(&["--generate-page", "man"]).ok(), Some(Some(Page::Man)));
        assert_eq!(asks(&["--config", "a.toml"]).ok(), Some(None));
        for wrong in
            [&["--generate-page", "html"][..], &["--generate-page", "man", "--resume"], &[]]
        {
            assert!(asks(wrong).is_err(), "{wrong:?}");
        }
    }
}
