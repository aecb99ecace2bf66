from services.ingest.service import main

main()
