//! Grids of runs into rows, and rows into tables and pictures beside published numbers.
//!
//! A [`Sweep`] is a TOML file in a folder of its own. Its [`Plan`] lists the runs, a [`SweepJob`]
//! does them and adds a line to the folder's `rows.csv` for each, and [`report`] makes the tables
//! and pictures of the folder's `README.md` from these lines alone. How a run is checked and done
//! is for a [`Runner`] to know.
//!
//! Numbers that are not comparable never meet unlabelled: see [`Published`] and [`Sweep::label`].

#![deny(missing_docs)]
#![deny(clippy::print_stdout, clippy::print_stderr)] // they panic where nobody reads
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod choose;
mod config;
mod definition;
mod departures;
mod dimensions;
mod error;
mod estimate;
mod events;
mod order;
mod picture;
mod plan;
mod published;
mod report;
mod requirements;
mod rows;
mod runner;
mod select;
mod state_size;
mod sweep;
mod values;
mod warm;

pub use config::{
    Figure, FigureKind, Limits, ReportConfig, Rule, SelectConfig, Statistic, SweepConfig, Unit,
    Variant, VariantsFrom,
};
pub use definition::{Plan, PlannedRun, Sweep};
pub use error::SweepError;
pub use estimate::{DryRun, Estimates, ExpectedRun, dry_run};
pub use events::write_events;
pub use order::Only;
pub use published::{Cells, Protocol, Published, PublishedTable, Tag};
pub use report::{Mode, Report, experiments, page, report, write_html};
pub use rows::{Added, FAILED, Row, Rows, RowsFile};
pub use runner::{Assignment, ChildProcess, Ending, Runner, Stop, finished, has_checkpoint};
pub use sweep::{Done, Shard, SweepJob};
pub use warm::Warmed;

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
