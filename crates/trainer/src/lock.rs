//! One process at a time writes to a run's folder.
//!
//! The lock is the system's, on the file `.run.lock`, and ends with the process that holds it, however
//! that ends. `.run.pid` says which process it is: on some systems nobody else can read a locked file.

use crate::folder_error::{FolderError, io_error};
use same_file::Handle;
use std::fs::{self, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const LOCK: &str = ".run.lock";
const OWNER: &str = ".run.pid";

/// The lock of a folder, held. Dropping it gives the folder back.
#[derive(Debug)]
pub(crate) struct FolderLock {
    root: PathBuf,
    file: Handle,
}

impl FolderLock {
    /// Takes the lock of the folder `root`, which is there. Locks that dead processes left are no
    /// obstacle.
    /// # Errors
    /// [`FolderError::InUse`] names the process that holds it.
    pub(crate) fn take(root: &Path) -> Result<Self, FolderError> {
        let path = root.join(LOCK);
        let error = || io_error("lock", &path);
        loop {
            let options = OpenOptions::new().create(true).append(true).open(&path);
            let file = options.map_err(error())?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(in_use(root)),
                // A file system that knows no locks; one run alone goes well there too.
                Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => {}
                Err(TryLockError::Error(e)) => return Err(error()(e)),
            }
            let lock = Self { root: root.into(), file: Handle::from_file(file).map_err(error())? };
            // Whoever held it before may have removed the file after it was opened here.
            if lock.holds() {
                let owner = root.join(OWNER);
                let id = std::process::id().to_string();
                fs::write(&owner, id).map_err(io_error("write", &owner))?;
                return Ok(lock);
            }
        }
    }

    /// Whether the folder is still this lock's: it may have been deleted, and made anew by others.
    pub(crate) fn holds(&self) -> bool {
        Handle::from_path(self.root.join(LOCK)).is_ok_and(|there| there == self.file)
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        if self.holds() {
            // A file that stays is taken over by the next process.
            for name in [OWNER, LOCK] {
                let _stays = fs::remove_file(self.root.join(name));
            }
        }
    }
}

fn in_use(root: &Path) -> FolderError {
    let id = fs::read_to_string(root.join(OWNER)).ok().and_then(|id| id.trim().parse().ok());
    let owner = id.map_or("another process".into(), |id: u32| format!("process {id}"));
    FolderError::InUse { path: root.into(), owner }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_lock_is_refused_by_the_owners_number_until_the_first_is_dropped() {
        let desk = tempfile::tempdir().unwrap();
        let first = FolderLock::take(desk.path()).unwrap();
        let why = FolderLock::take(desk.path()).unwrap_err().to_string();
        assert!(why.contains(&format!("process {}", std::process::id())), "{why}");
        drop(first);
        assert_eq!(fs::read_dir(desk.path()).unwrap().count(), 0, "it leaves nothing");
        FolderLock::take(desk.path()).unwrap();
    }

    #[test]
    fn what_a_dead_process_left_is_taken_over() {
        let desk = tempfile::tempdir().unwrap();
        fs::write(desk.path().join(LOCK), "").unwrap();
        fs::write(desk.path().join(OWNER), "4294967295").unwrap();
        let lock = FolderLock::take(desk.path()).unwrap();
        let owner = fs::read_to_string(desk.path().join(OWNER)).unwrap();
        assert_eq!(owner, std::process::id().to_string());
        assert!(lock.holds());
    }

    #[cfg(unix)] // elsewhere a locked file cannot be removed
    #[test]
    fn a_folder_that_was_removed_and_made_anew_is_somebody_elses() {
        let desk = tempfile::tempdir().unwrap();
        let root = desk.path().join("run");
        fs::create_dir(&root).unwrap();
        let first = FolderLock::take(&root).unwrap();
        fs::remove_dir_all(&root).unwrap();
        assert!(!first.holds());
        fs::create_dir(&root).unwrap();
        let second = FolderLock::take(&root).unwrap();
        drop(first);
        assert!(second.holds(), "the first removes only what is its own");
    }

    #[test]
    fn of_many_that_come_and_go_at_once_one_alone_has_it() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        let desk = tempfile::tempdir().unwrap();
        let (inside, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..300 {
                        if let Ok(_lock) = FolderLock::take(desk.path()) {
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                            taken.fetch_add(1, Ordering::SeqCst);
                            inside.fetch_sub(1, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert!(taken.into_inner() > 0);
    }
}
