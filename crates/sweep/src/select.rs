//! From rows to the settings that are reported.

use crate::choose::{Candidate, Chosen, choose, row_of, split};
use crate::order::{Asked, Order};
use crate::rows::Row;
use crate::values::Settings;
use crate::{Sweep, SweepError};

/// All groups in the sweep's order, and what else the rows hold.
#[derive(Debug, Clone)]
pub(crate) struct Selection {
    pub(crate) groups: Vec<Chosen>,
    /// Runs that the sweep asks for.
    pub(crate) wanted: usize,
    /// Rows of these.
    pub(crate) done: Vec<Row>,
    /// Rows of runs that the sweep does not ask for.
    pub(crate) unmatched: usize,
}

/// Chooses in each group by the sweep's rule. A setting with more of its replicates done comes
/// before a better one with fewer: what diverges for one seed is no setting to report. Of equals
/// the first in the grid is taken.
pub(crate) fn select(sweep: &Sweep, rows: &[Row]) -> Result<Selection, SweepError> {
    let config = &sweep.config.select;
    let mut groups: Vec<(Settings, Vec<Candidate>)> = vec![];
    let mut done = vec![];
    let wanted = sweep.settings()?;
    for settings in &wanted {
        let row = row_of(rows, settings);
        done.extend(row.cloned());
        let (group, choice) = split(config, settings);
        let place = groups.iter().position(|(known, _)| *known == group).unwrap_or_else(|| {
            groups.push((group, vec![]));
            groups.len() - 1
        });
        Candidate::add(&mut groups[place].1, choice, row);
    }
    let groups = groups.into_iter().map(|(group, list)| choose(config, group, list));
    let groups = groups.collect::<Result<_, _>>()?;
    let unmatched = rows.len() - done.len();
    let order = Order::new(sweep, &wanted, rows)?;
    let counts =
        |run: &usize| order.asked(*run) != Asked::No || row_of(rows, &wanted[*run]).is_some();
    let wanted = (0..wanted.len()).filter(counts).count();
    Ok(Selection { groups, wanted, done, unmatched })
}
