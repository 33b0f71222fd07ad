//! Text columns for enums of the domain, so that deciding code does not depend on the database.

use sea_orm::sea_query::{ArrayType, ColumnType, Nullable, ValueType, ValueTypeErr};
use sea_orm::{ColIdx, DbErr, QueryResult, TryGetError, TryGetable, Value};

use crate::outcome::StopReason;
use crate::placement::{Desired, Kind, State};

macro_rules! stored_as_text {
    ($enum:ident { $($variant:ident = $text:literal),+ $(,)? }) => {
        impl $enum {
            /// Returns the text of the column.
            pub(crate) fn text(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }

            fn of_text(text: &str) -> Option<Self> {
                match text {
                    $($text => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }

        impl From<$enum> for Value {
            fn from(value: $enum) -> Self {
                value.text().into()
            }
        }

        impl TryGetable for $enum {
            fn try_get_by<I: ColIdx>(row: &QueryResult, index: I) -> Result<Self, TryGetError> {
                let text = String::try_get_by(row, index)?;
                let unknown = || DbErr::Type(format!("cannot read a column: {text:?} is not a value of {}", stringify!($enum)));
                Self::of_text(&text).ok_or_else(|| TryGetError::DbErr(unknown()))
            }
        }

        impl ValueType for $enum {
            fn try_from(value: Value) -> Result<Self, ValueTypeErr> {
                let text = <String as ValueType>::try_from(value)?;
                Self::of_text(&text).ok_or(ValueTypeErr)
            }

            fn type_name() -> String {
                stringify!($enum).to_owned()
            }

            fn array_type() -> ArrayType {
                ArrayType::String
            }

            fn column_type() -> ColumnType {
                ColumnType::Text
            }
        }

        impl Nullable for $enum {
            fn null() -> Value {
                <String as Nullable>::null()
            }
        }
    };
}

stored_as_text!(Kind {
    Task = "task",
    Get = "get",
    Put = "put",
    Check = "check",
    Service = "service",
    Transfer = "transfer",
});

stored_as_text!(Desired { Run = "run", Cordon = "cordon", Retire = "retire" });

stored_as_text!(State { Running = "running", Stalled = "stalled", Lost = "lost" });

stored_as_text!(StopReason {
    Cancelled = "CANCELLED",
    StartTimeout = "START_TIMEOUT",
    RunTimeout = "RUN_TIMEOUT",
    Interrupted = "INTERRUPTED",
    WorkerLost = "WORKER_LOST",
    Released = "RELEASED",
    Expired = "EXPIRED",
});
